"""How many tokens a pass verifies for each request: a fixed window, or the one that gives the most tokens a second.

A drafter always drafts its whole block; a window of w verifies w - 1 of its guesses, and a window of 1 drafts none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from dflash_trt.runtime.acceptance import Acceptance
from dflash_trt.runtime.pass_costs import PassCosts
from dflash_trt.runtime.request import Request

_PROBING = 0.01
"""Share of the time that may go into looking whether another window is better by now."""
_HOPEFUL = 0.7
"""What a guess is thought to be worth before any was verified."""


class WindowPolicy(Protocol):
    """Decides before every decode step, and is told what came of it."""

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that the next pass verifies for each, 1 to what it may still emit; its own window where it has one."""

    def observe(
        self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Of each, how many guesses the target agreed with, and what the step took."""


class FixedWindow:
    """One window for all requests that have none of their own."""

    def __init__(self, window: int) -> None:
        self._window = window

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """See `WindowPolicy.choose`."""
        return [_width(request, self._window) for request in requests]

    def observe(
        self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Nothing to learn."""


class AdaptiveWindow:
    """The window at which the requests of a batch are expected to emit the most tokens a second together.

    What a step emits is expected from the acceptance of each request so far, what it takes from the steps that were
    run. Now and then, and at a cost of no more than a hundredth of the time, another window is tried: acceptance beyond
    the present one is not seen, and grows old.
    """

    def __init__(self, block_size: int, costs: PassCosts) -> None:
        self._block_size = block_size
        self._costs = costs
        self._of_all = Acceptance([_HOPEFUL] * (block_size - 1), weight=1)
        self._of_each: WeakKeyDictionary[Request, Acceptance] = WeakKeyDictionary()
        self._allowance = 0.0
        """Seconds that a probe may lose."""
        self._turn = 0

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """See `WindowPolicy.choose`."""
        expected = [self._acceptance(request).expected_tokens() for request in requests]
        promises: list[_Promise] = []
        # Wide ones first: where nothing is known yet, the first step drafts and the second does not.
        for window in range(self._block_size, 0, -1):
            widths = [_width(request, window) for request in requests]
            seconds = self._costs.seconds(len(requests), max(widths))
            if seconds is None:
                return widths
            tokens = sum(each[width - 1] for each, width in zip(expected, widths, strict=True))
            promises.append(_Promise(window, widths, tokens, seconds))
        best = max(promises, key=lambda promise: promise.tokens / promise.seconds)
        return self._probe(promises, best).widths

    def observe(
        self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """See `WindowPolicy.observe`."""
        self._costs.observe(len(requests), max(windows), seconds)
        self._allowance += _PROBING * seconds
        for request, window, agreed in zip(requests, windows, accepted, strict=True):
            self._of_all.observe(window - 1, agreed)
            self._acceptance(request).observe(window - 1, agreed)

    def _probe(self, promises: Sequence[_Promise], best: _Promise) -> _Promise:
        """The best window, or another whose turn it is to be looked at, once that loses no more than is allowed."""
        turn = (self._block_size, best.window - 1, best.window + 1)[self._turn]
        probe = promises[self._block_size - turn] if 1 <= turn <= self._block_size else best
        loss = probe.seconds - probe.tokens * best.seconds / best.tokens
        if probe.widths != best.widths and loss > self._allowance:
            return best
        self._turn = (self._turn + 1) % 3
        if probe.widths == best.widths:
            return best
        self._allowance -= loss
        return probe

    def _acceptance(self, request: Request) -> Acceptance:
        found = self._of_each.get(request)
        if found is None:
            found = self._of_each[request] = Acceptance(list(self._of_all.likely), weight=4)
        return found


@dataclass(frozen=True)
class _Promise:
    """What a step with a window is expected to emit and to take."""

    window: int
    widths: list[int]
    tokens: float
    seconds: float


def _width(request: Request, window: int) -> int:
    return min(request.verify_window or window, request.remaining)
