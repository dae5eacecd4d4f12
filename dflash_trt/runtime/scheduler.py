"""Which request is in which slot: requests come in, are decoded together, and leave as each one ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.speculative import decode, prefill
from dflash_trt.runtime.step import Executor


@dataclass(frozen=True)
class Emission:
    """One token that a request emitted."""

    request: Request
    token: int
    text: str
    """The text it completes, possibly empty."""
    drafted: bool
    """The drafter guessed it and the target agreed."""


class Scheduler:
    """First come, first served, over an executor's slots.

    Active requests keep to the front: request i of `running` is in slot i, and when one ends, the last one moves into
    its slot.
    """

    def __init__(self, executor: Executor, window: int) -> None:
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.target_passes = 0
        self._executor = executor
        self._window = window
        self._sampling: Sampling | None = None

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests."""
        self.waiting.extend(requests)

    @property
    def idle(self) -> bool:
        """No request waits or runs."""
        return not self.waiting and not self.running

    def step(self) -> list[Emission]:
        """Let waiting requests into free slots, then give every running one its next tokens."""
        emissions = []
        while self.waiting and len(self.running) < self._executor.max_batch_size:
            emissions += self._admit(self.waiting.popleft())
        if self.running:
            emissions += self._decode()
        return emissions

    def _admit(self, request: Request) -> list[Emission]:
        sampling = Sampling.of([request.params], [request.penalties])
        token, passes = prefill(self._executor, request, len(self.running), sampling)
        self.target_passes += passes
        emission = Emission(request, token, request.append(token), drafted=False)
        if request.finish_reason is None:
            self.running.append(request)
            self._sampling = None
        return [emission]

    def _decode(self) -> list[Emission]:
        if self._sampling is None:
            self._sampling = Sampling.of(
                [request.params for request in self.running], [request.penalties for request in self.running]
            )
        self.target_passes += 1
        blocks = decode(self._executor, self.running, self._sampling, self._window)
        emissions = []
        for request, block in zip(self.running, blocks, strict=True):
            for index, token in enumerate(block):
                request.statistics.decoded_tokens += 1
                drafted = index < len(block) - 1
                emissions.append(Emission(request, token, request.append(token), drafted))
                if request.finish_reason is not None:
                    break
        self._retire()
        return emissions

    def _retire(self) -> None:
        for slot in reversed(range(len(self.running))):
            if self.running[slot].finish_reason is None:
                continue
            last = self.running.pop()
            if slot < len(self.running):
                self._executor.move_slot(len(self.running), slot, last.kv_len)
                self.running[slot] = last
            self._sampling = None
