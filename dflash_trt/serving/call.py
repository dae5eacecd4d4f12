"""One call of a completion endpoint: its choices, and what its responses say beside them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from dflash_trt.runtime.request import Request, Statistics
from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.answer import Answer
from dflash_trt.serving.errors import ApiError
from dflash_trt.serving.protocol import CommonRequest


class Choice(ABC):
    """One output as its client sees it.

    Args:
        index: its place in the response.
        request: what makes it.
    """

    def __init__(self, index: int, request: Request) -> None:
        self.index = index
        self.request = request
        self.emitted = 0
        """Tokens so far."""

    @abstractmethod
    def begin(self) -> dict[str, Any] | None:
        """What a stream says before the first tokens."""

    @abstractmethod
    def advance(self, emissions: Sequence[Emission]) -> dict[str, Any] | None:
        """What a chunk says of these, which follow those before; None of nothing."""

    @abstractmethod
    def finish(self) -> list[dict[str, Any]]:
        """What the last chunks say."""

    @abstractmethod
    def whole(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """What a response says that is not streamed, of everything emitted."""


class Call:
    """What a client asked for, and the requests that make it.

    Args:
        body: of the client's request.
        model: what the model is called.
        name: of the kind of object: of a response, and of a chunk.
    """

    def __init__(
        self, body: CommonRequest, choices: Sequence[Choice], *, model: str, prefix: str, names: tuple[str, str]
    ) -> None:
        self.body = body
        self.choices = choices
        self._of_request = {choice.request: choice for choice in choices}
        self._head = {"id": f"{prefix}-{token_hex(12)}", "created": int(time.time()), "model": model}
        self._whole_name, self._chunk_name = names

    def choice_of(self, request: Request) -> Choice:
        """The choice that a request makes."""
        return self._of_request[request]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk of a stream."""
        usage = {"usage": self.usage()} if self.body.usage_always else {}
        return {**self._head, "object": self._chunk_name, "choices": choices, **usage}

    def last_chunk(self) -> dict[str, Any] | None:
        """What a stream says after all choices have ended."""
        if not self.body.usage_at_end and not self.body.return_speculation:
            return None
        chunk = {**self.chunk([]), **self._speculation()}
        return {**chunk, "usage": self.usage()} if self.body.usage_at_end else chunk

    def usage(self) -> dict[str, int]:
        """Tokens so far; a prompt of several outputs counts once."""
        count = self.body.n or 1
        prompts = sum(choice.request.prompt_length for choice in self.choices[::count])
        completions = sum(choice.emitted for choice in self.choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completions,
            "total_tokens": prompts + completions,
        }

    async def emissions(self, answer: Answer) -> dict[Request, list[Emission]]:
        """Everything that its requests emit, until they have ended.

        Raises:
            ApiError: a request ended otherwise than by its own end.
            ShuttingDown: the engine failed.
        """
        emissions: dict[Request, list[Emission]] = {choice.request: [] for choice in self.choices}
        async for progress in answer:
            for emission in progress.emissions:
                emissions[emission.request].append(emission)
            for request in progress.ended:
                require_end(request)
        return emissions

    def whole(self, emissions: Mapping[Request, Sequence[Emission]]) -> dict[str, Any]:
        """The response that is not streamed, of everything emitted."""
        choices = [choice.whole(emissions[choice.request]) for choice in self.choices]
        whole = {**self._head, "object": self._whole_name, "choices": choices, "usage": self.usage()}
        return whole | self._speculation()

    def _speculation(self) -> dict[str, Any]:
        if not self.body.return_speculation:
            return {}
        total = Statistics()
        for choice in self.choices:
            total.add(choice.request.statistics)
        return {"speculation": speculation(total)}


def speculation(statistics: Statistics) -> dict[str, Any]:
    """What speculation did for a call; lengths count the target's own token, rates do not."""
    drafts, guesses, accepted = statistics.drafts, statistics.draft_tokens, statistics.accepted_tokens
    longest = max(statistics.acceptance_histogram, default=-1)
    return {
        "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
        "draft_acceptance_rate": accepted / guesses if guesses else 0.0,
        "acceptance_histogram": [statistics.acceptance_histogram[count] for count in range(longest + 1)],
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": guesses,
    }


def sources(emissions: Sequence[Emission]) -> list[dict[str, Any]]:
    """How each token came."""
    return [{"text": emission.text, "drafted": emission.drafted} for emission in emissions]


def require_end(request: Request) -> None:
    """See that a request came to its own end.

    Raises:
        ApiError: it was ended, or failed.
    """
    if request.finish_reason == "deadline":
        raise ApiError(504, "the request took longer than this server allows", code="request_timeout")
    if request.finish_reason == "cancelled":
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    if request.finish_reason == "error":
        raise ApiError(500, request.error or "the request failed", code="internal_error")
