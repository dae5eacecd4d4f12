"""How many tokens a pass verifies for each request: a fixed window, or the one that gives the most tokens a second.

A drafter always drafts its whole block; a window of w verifies w - 1 of its draft tokens, a window of 1 drafts none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dflash_trt.runtime.acceptance import Acceptance
from dflash_trt.runtime.pass_costs import PassCosts
from dflash_trt.runtime.request import Request

_LOOKING = 0.01
"""Share of the time that may go into looking whether later draft tokens are accepted by now."""
_MEMORY = 32
"""Verifications that a request's acceptance is estimated from."""
_MEMORY_OF_ALL = 1000
_WEIGHT_OF_ALL = 16
"""Verifications of a request that count as much as those of all others together."""
_HOPEFUL = 0.7
"""What a draft token is thought to be worth before any was verified."""


class WindowPolicy(Protocol):
    """Decides before every decode step, and is told what came of it."""

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """Tokens that the next pass verifies for each, 1 to what it may still emit; its own window where it has one."""

    def observe(self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int]) -> None:
        """Of each, how many draft tokens the target agreed with."""


class FixedWindow:
    """One window for all requests that have none of their own."""

    def __init__(self, window: int) -> None:
        self._window = window

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """See `WindowPolicy.choose`."""
        return [_width(request, self._window) for request in requests]

    def observe(self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing to learn."""


class AdaptiveWindow:
    """The window at which the requests of a batch are expected to emit the most tokens a second together.

    What a step emits is expected from the acceptance of each request so far; what it takes was measured. A machine that
    is slower for a while is so at every window, which changes nothing. Acceptance beyond the present window is not seen
    and grows old, so wider ones are tried now and then, at a cost of no more than a hundredth of the time.
    """

    def __init__(self, max_window: int, costs: PassCosts) -> None:
        self._max_window = max_window
        self._costs = costs
        self._of_all = Acceptance([_HOPEFUL] * (max_window - 1), weight=1, memory=_MEMORY_OF_ALL)
        self._allowed = [0.0, 0.0]
        """Seconds that a look at the whole block, and at one draft token more, may lose."""

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """See `WindowPolicy.choose`."""
        if all(request.verify_window is not None for request in requests):
            return [_width(request, 1) for request in requests]
        tokens = list(map(sum, zip(*map(self._expected, requests), strict=True)))
        seconds = [self._costs.seconds(len(requests), width) for width in self._widest(requests)]
        window = self._decide(tokens, seconds)
        return [_width(request, window) for request in requests]

    def observe(self, requests: Sequence[Request], windows: Sequence[int], accepted: Sequence[int]) -> None:
        """See `WindowPolicy.observe`."""
        for request, window, agreed in zip(requests, windows, accepted, strict=True):
            if window > 1:
                self._of_all.observe(window - 1, agreed)
                self._acceptance(request).observe(window - 1, agreed)

    def _acceptance(self, request: Request) -> Acceptance:
        if request.acceptance is None:
            request.acceptance = Acceptance(list(self._of_all.likely), weight=_WEIGHT_OF_ALL, memory=_MEMORY)
        return request.acceptance

    def _expected(self, request: Request) -> list[float]:
        """[b] tokens that it emits with every window of the batch, 1 to the block size."""
        tokens = self._acceptance(request).expected_tokens()
        if request.verify_window is None and request.remaining >= self._max_window:
            return tokens
        return [tokens[_width(request, window) - 1] for window in range(1, self._max_window + 1)]

    def _widest(self, requests: Sequence[Request]) -> list[int]:
        """[b] the most tokens that a pass has of a request, with every window of the batch."""
        free = max((request.remaining for request in requests if request.verify_window is None), default=1)
        own = max((_width(request, 1) for request in requests), default=1)
        return [max(own, min(window, free)) for window in range(1, self._max_window + 1)]

    def _decide(self, tokens: Sequence[float], seconds: Sequence[float]) -> int:
        """The best window, or a wider one once a look at it loses no more than is allowed."""
        rates = [token / second for token, second in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        for look, index in enumerate((self._max_window - 1, best + 1)):
            if index <= best or index >= self._max_window:
                continue
            self._allowed[look] += _LOOKING / len(self._allowed) * seconds[best]
            loss = seconds[index] - tokens[index] / rates[best]
            if loss <= self._allowed[look]:
                self._allowed[look] = 0.0  # also where a larger batch saved for a look at it
                return index + 1
        return best + 1


def _width(request: Request, window: int) -> int:
    return min(request.verify_window or window, request.remaining)
