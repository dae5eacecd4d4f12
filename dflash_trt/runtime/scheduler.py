"""Requests come in, are decoded together, and leave as each one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dflash_trt.errors import UserError
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.kept import KeptSequences
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.slots import Prefill, Slots
from dflash_trt.runtime.speculative import Block, decode, prefill
from dflash_trt.runtime.waiting import WaitingQueue
from dflash_trt.runtime.window import WindowPolicy

_MOST_PROMPTS = 8
"""Of a step: however short, each has a pass of its own, for which others wait."""


@dataclass(frozen=True)
class Emission:
    """One token that a request emitted."""

    request: Request
    token: int
    text: str
    """The text it completes, possibly empty."""
    drafted: bool
    """The drafter guessed it and the target agreed."""
    logprobs: TokenLogprobs | None = None
    """Where the request's parameters ask for them."""
    offset: int = 0
    """Where in the output's text its own text begins."""


class Scheduler:
    """In-flight batching over an executor's slots: a step is a chunk of prompts, then one pass of all that decode.

    Prompts are run one after the other, by priority and then first come, first served; short ones share a step as
    far as they are no longer than a chunk together, and are no more than eight. One of many chunks shares its turns
    with those of a single one, or of which the caches have all but that, so that nobody who asks something short
    waits until it is through: they overtake it every other step. Requests that decode keep to the front: request i
    of `running` is in slot i, and when one ends, the last one moves into its slot. A prompt under way is somewhere
    behind them, and so are kept sequences.

    For one thread: what adds and cancels is what steps.

    Args:
        windows: says how many tokens a pass verifies for each request.
        max_batch_size: requests that are in slots at once, where that is to be fewer than the executor's.
        reuse_prefixes: keep the caches of what has ended while its slot is not needed, and start a prompt after the
            tokens that it shares with the most similar of these, or of what is running. Both caches have one length,
            so that a drafter guesses as well as after a prompt that was run.
        clock: what deadlines are told by, in seconds.

    Raises:
        UserError: the executor has not so many slots.
    """

    def __init__(
        self,
        executor: Executor,
        windows: WindowPolicy,
        *,
        max_batch_size: int | None = None,
        reuse_prefixes: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = WaitingQueue()
        self.prefilling: Prefill | None = None
        self.ended: list[Request] = []
        """Requests that the last step found or made ended, for whatever reason: each is here once."""
        self.target_passes = 0
        self.window = 1
        """Of the last decode step, the most tokens that were verified for a request."""
        if max_batch_size is not None and not 1 <= max_batch_size <= executor.max_batch_size:
            raise UserError(
                f"max_batch_size is {max_batch_size}, it must be 1 to the engine's max_batch_size of "
                f"{executor.max_batch_size}"
            )
        self.max_batch_size = executor.max_batch_size if max_batch_size is None else max_batch_size
        self._executor = executor
        self._slots = Slots(executor, self.max_batch_size, reuse_prefixes=reuse_prefixes)
        self._windows = windows
        self._clock = clock
        self._sampling: Sampling | None = None
        self._cancelled_some = False
        self._overtook = False
        """The last chunk was of a prompt that ran before the rest of `prefilling`."""

    @property
    def running(self) -> list[Request]:
        """Those that decode; request i is in slot i."""
        return self._slots.running

    @property
    def kept(self) -> KeptSequences:
        """What has ended and is still in its slot."""
        return self._slots.kept

    @property
    def prefix_queries(self) -> int:
        """See `Slots.prefix_queries`."""
        return self._slots.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """See `Slots.prefix_hits`."""
        return self._slots.prefix_hits

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
            self.waiting.push(request, is_short=self._slots.is_short(request))

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
        """Run a chunk of prompts, then give every running request its next tokens."""
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
                self._end_prompt(self.prefilling)

    def _prefill(self) -> list[Emission]:
        """A chunk of the prompt whose turn it is, then others whose rest fits into what it left of the longest chunk.

        Until its prompt is through, a slot decodes nothing.
        """
        emissions: list[Emission] = []
        room, least = self._executor.max_num_tokens, -(-self._executor.max_num_tokens // _MOST_PROMPTS)
        prompt = self._turn()
        while prompt is not None:
            start = prompt.kv_len
            emissions += self._run_chunk(prompt)
            room -= max(prompt.kv_len - start, least)
            prompt = self._another(room)
        return emissions

    def _run_chunk(self, prompt: Prefill) -> list[Emission]:
        self.target_passes += 1
        prompt.kv_len, block = prefill(self._executor, prompt.request, prompt.slot, prompt.kv_len, prompt.sampling)
        if block is None:
            return []
        emissions = _emit(prompt.request, block)
        if prompt.request.finish_reason is None:
            self._is_through(prompt)
            self._slots.start(prompt)
            self._sampling = None
        else:
            self._end_prompt(prompt)
        return emissions

    def _another(self, room: int) -> Prefill | None:
        """Who is next, if the rest of its prompt is no longer than that."""
        if room <= 0 or self.prefilling is not None or not self._has_place:
            return None
        if self._slots.rest(self.waiting.first) > room:
            return None
        return self._slots.admit(self.waiting.pop())

    def _turn(self) -> Prefill | None:
        """The prompt that runs a chunk first."""
        under_way = self.prefilling
        if under_way is None:
            self._overtook = False
            if self._has_place:
                self.prefilling = self._slots.admit(self.waiting.pop())
            return self.prefilling
        short = None if self._overtook else self._next_short(under_way)
        self._overtook = short is not None
        if short is None:
            return under_way
        self._slots.step_aside(under_way)
        return self._slots.admit(short)

    def _next_short(self, under_way: Prefill) -> Request | None:
        """Who may overtake a prompt: one that is through in this step, and has a slot to go on in."""
        left = under_way.request.prompt_length - under_way.kv_len
        if left <= self._executor.max_num_tokens or len(self.running) + 2 > self.max_batch_size:
            return None
        return self.waiting.pop_short(under_way.request.priority, partial(self._slots.is_short, before=under_way))

    @property
    def _has_place(self) -> bool:
        """Somebody waits, and a slot is there for it."""
        return bool(self.waiting) and len(self.running) < self.max_batch_size

    def _is_through(self, prompt: Prefill) -> None:
        if prompt is self.prefilling:
            self.prefilling = None

    def _end_prompt(self, prompt: Prefill) -> None:
        self._is_through(prompt)
        self._slots.leave(prompt)
        self.ended.append(prompt.request)

    def _decode(self) -> list[Emission]:
        if self._sampling is None:
            self._sampling = Sampling.of(
                [request.params for request in self.running], [request.edits for request in self.running]
            )
        self.target_passes += 1
        windows = self._windows.choose(self.running)
        blocks = decode(self._executor, self.running, self._sampling, windows)
        verified = [block.draft_len + 1 for block in blocks]
        accepted = [max(0, len(block.tokens) - 1) for block in blocks]
        self._windows.observe(self.running, verified, accepted)
        self.window = max(verified)
        emissions = []
        for request, block in zip(self.running, blocks, strict=True):
            emitted = _emit(request, block)
            request.statistics.decoded_tokens += len(emitted)
            emissions += emitted
        self._retire()
        return emissions

    def _retire(self) -> None:
        ended = self._slots.retire()
        if ended:
            self.ended += ended
            self._sampling = None


def _emit(request: Request, block: Block) -> list[Emission]:
    """Give a request its tokens, up to the one that ends it."""
    emissions = []
    for index, token in enumerate(block.tokens):
        drafted = block.error is not None or index < len(block.tokens) - 1
        logprobs = block.logprobs[index] if block.logprobs else None
        offset = request.text_length
        emissions.append(Emission(request, token, request.append(token, logprobs), drafted, logprobs, offset))
        if request.finish_reason is not None:
            return emissions
    if block.error is not None:
        request.fail(block.error)
    return emissions
