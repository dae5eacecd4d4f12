"""Which request is in which slot: requests come in, are decoded together, and leave as each one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dflash_trt.errors import UserError
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.speculative import decode, prefill
from dflash_trt.runtime.step import Executor
from dflash_trt.runtime.waiting import WaitingQueue


@dataclass(frozen=True)
class Emission:
    """One token that a request emitted."""

    request: Request
    token: int
    text: str
    """The text it completes, possibly empty."""
    drafted: bool
    """The drafter guessed it and the target agreed."""


@dataclass
class Prefill:
    """A prompt under way."""

    request: Request
    slot: int
    sampling: Sampling
    kv_len: int = 0
    """Tokens of it that are in the slot's caches."""


class Scheduler:
    """In-flight batching over an executor's slots: a step is one chunk of one prompt, then one pass of all that decode.

    Prompts are run one after the other, by priority and then first come, first served; a prompt under way is finished
    before any other. Requests that decode keep to the front: request i of `running` is in slot i, and when one ends,
    the last one moves into its slot. A prompt under way is somewhere behind them.

    For one thread: what adds and cancels is what steps.

    Args:
        window: tokens that a pass verifies for a request, 1 to the block size.
        clock: what deadlines are told by, in seconds.
    """

    def __init__(self, executor: Executor, window: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.waiting = WaitingQueue()
        self.prefilling: Prefill | None = None
        self.running: list[Request] = []
        self.ended: list[Request] = []
        """Requests that the last step found or made ended, for whatever reason: each is here once."""
        self.target_passes = 0
        self._executor = executor
        self._window = window
        self._clock = clock
        self._sampling: Sampling | None = None
        self._cancelled_some = False

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests.

        Raises:
            UserError: one may become longer than a slot. Caches hold a block beyond `max_seq_len`, for what a pass
                writes past a sequence, and no more.
        """
        for request in requests:
            if request.limit > self._executor.max_seq_len:
                raise UserError(
                    f"a request of up to {request.limit} tokens does not fit the engine's max_seq_len of "
                    f"{self._executor.max_seq_len}"
                )
            self.waiting.push(request)

    def cancel(self, request: Request) -> None:
        """End a request as it is: it emits nothing more, and the next step frees its slot. One that ended stays so."""
        if request.finish_reason is None:
            request.finish_reason = "cancelled"
            self._cancelled_some = True

    @property
    def idle(self) -> bool:
        """No request waits or is in a slot."""
        return not self.waiting and not self.holds_slots

    @property
    def holds_slots(self) -> bool:
        """Some request is in a slot."""
        return self.prefilling is not None or bool(self.running)

    def step(self) -> list[Emission]:
        """Run a chunk of the prompt whose turn it is, then give every running request its next tokens."""
        self.ended = []
        self._leave_early()
        emissions = self._prefill()
        if self.running:
            emissions += self._decode()
        return emissions

    def _leave_early(self) -> None:
        """Take out what was cancelled or is late."""
        now = self._clock()
        if self._cancelled_some or self.waiting.has_late(now):
            self._cancelled_some = False
            self.ended += self.waiting.remove_ended(now)
        for request in self.running:
            request.end_if_late(now)
        self._retire()
        if self.prefilling is not None:
            self.prefilling.request.end_if_late(now)
            if self.prefilling.request.finish_reason is not None:
                self.ended.append(self.prefilling.request)
                self.prefilling = None

    def _prefill(self) -> list[Emission]:
        if self.prefilling is None and self.waiting and len(self.running) < self._executor.max_batch_size:
            request = self.waiting.pop()
            self.prefilling = Prefill(request, len(self.running), Sampling.of([request.params], [request.penalties]))
        if self.prefilling is None:
            return []
        prompt = self.prefilling
        self.target_passes += 1
        prompt.kv_len, token = prefill(self._executor, prompt.request, prompt.slot, prompt.kv_len, prompt.sampling)
        if token is None:
            return []
        self.prefilling = None
        emission = Emission(prompt.request, token, prompt.request.append(token), drafted=False)
        if prompt.request.finish_reason is None:
            self._start(prompt)
        else:
            self.ended.append(prompt.request)
        return [emission]

    def _start(self, prompt: Prefill) -> None:
        """Let a request decode. Others may have ended while its prompt ran, and left a hole before it."""
        slot = len(self.running)
        if slot < prompt.slot:
            self._executor.move_slot(prompt.slot, slot, prompt.kv_len)
        self.running.append(prompt.request)
        self._sampling = None

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
            self.ended.append(self.running[slot])
            last = self.running.pop()
            if slot < len(self.running):
                self._executor.move_slot(len(self.running), slot, last.kv_len)
                self.running[slot] = last
            self._sampling = None
