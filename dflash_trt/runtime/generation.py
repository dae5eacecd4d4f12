"""What a call gives: tokens as they come, and its outputs when all have."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.request import FinishReason, Request, Statistics
from dflash_trt.runtime.scheduler import Emission, Scheduler

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    """What repeats a sampled output."""
    statistics: Statistics
    logprobs: list[TokenLogprobs] | None
    """Of each token, where the parameters ask for them."""
    error: str | None
    """One line, where `finish_reason` is "error"; the output is what came before it."""

    @classmethod
    def of(cls, request: Request) -> CompletionOutput:
        """The output of a finished request."""
        assert request.finish_reason is not None and request.params.seed is not None
        return cls(
            request.text,
            request.output,
            request.finish_reason,
            request.params.seed,
            request.statistics,
            request.logprobs if request.params.logprobs is not None else None,
            request.error,
        )


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its `SamplingParams.n` outputs."""

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


@dataclass(frozen=True)
class Generation(Sequence[RequestOutput]):
    """The outputs of a call, in the order of its prompts, and what the whole call took."""

    outputs: list[RequestOutput]
    statistics: Statistics
    target_passes: int
    """Passes of the target, each shared by all requests that were running."""
    seconds: float
    """Time spent decoding; not encoding prompts, nor what a caller did between the tokens of a stream."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests over the time that decoding took, prompts included; 0 of nothing."""
        return self.statistics.output_tokens / self.seconds if self.seconds else 0.0

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: Any) -> Any:
        return self.outputs[index]


class TokenStream(Iterator[Emission]):
    """A call in progress: iterate it for tokens of all requests as they come, then ask for its `result`.

    It may be left and taken up again: no token is lost between.

    Args:
        prompts: of the call.
        requests: of each prompt, one for every output, none of them queued yet.
        scheduler: for these alone.
        may_step: called before every step; it raises where the slots have been used by another.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Sequence[Request]],
        scheduler: Scheduler,
        may_step: Callable[[], None],
    ) -> None:
        self._prompts = prompts
        self._requests = requests
        self._scheduler = scheduler
        self._scheduler.add(request for each in requests for request in each)
        self._may_step = may_step
        self._seconds = 0.0
        self._ready: deque[Emission] = deque()

    @property
    def most_tokens(self) -> int:
        """Output tokens of all requests together, at most."""
        return sum(request.statistics.output_tokens + request.remaining for each in self._requests for request in each)

    def __next__(self) -> Emission:
        """The next token of any request. One that ends in an error has no more; its output says why."""
        while not self._ready:
            if self._scheduler.idle:
                raise StopIteration
            self._may_step()
            started = time.perf_counter()
            self._ready.extend(self._scheduler.step())
            self._seconds += time.perf_counter() - started
        return self._ready.popleft()

    def result(self) -> Generation:
        """Decode whatever is left, and give everything."""
        for _ in self:
            pass
        total = Statistics()
        for requests in self._requests:
            for request in requests:
                total.add(request.statistics)
        outputs = [
            RequestOutput(prompt, requests[0].prompt, [CompletionOutput.of(request) for request in requests])
            for prompt, requests in zip(self._prompts, self._requests, strict=True)
        ]
        return Generation(outputs, total, self._scheduler.target_passes, self._seconds)
