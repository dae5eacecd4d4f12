"""What all endpoints share: an engine, how it is served, and requests made ready for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dflash_trt.checkpoint.encoding import template_of
from dflash_trt.runtime.generation import Prompt
from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.structured import InvalidForm, StructuredOutputs
from dflash_trt.serving.answer import ShuttingDown
from dflash_trt.serving.chat_protocol import ChatMessage
from dflash_trt.serving.engine_thread import EngineThread, QueueFull
from dflash_trt.serving.errors import ApiError
from dflash_trt.serving.formats import Formats, formats_of
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.limits import RequestLimits
from dflash_trt.serving.protocol import CommonRequest
from dflash_trt.serving.settings import ServerSettings
from dflash_trt.serving.tokens import TokenTexts
from dflash_trt.serving.tools import ToolUse
from dflash_trt.serving.unknown_fields import IgnoredFields
from dflash_trt.serving.workers import Workers


@dataclass(frozen=True)
class Service:
    """An engine being served."""

    llm: LLM
    settings: ServerSettings
    engine: EngineThread
    texts: TokenTexts
    defaults: dict[str, Any]
    """Sampling parameters where a client gives none."""
    limits: RequestLimits
    ignored_fields: IgnoredFields
    workers: Workers = dataclasses.field(default_factory=Workers)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self.llm.engine.config.pretrained_config.vocab_size

    def formats(self, use: ToolUse) -> Formats:
        """What the model speaks, by the chat template that a request gets."""
        return formats_of(template_of(self.llm.tokenizer, tools=bool(use.tools)))

    def require_model(self, name: str | None) -> None:
        """See that a client means the model that is served.

        Raises:
            ApiError: it does not.
        """
        if name is not None and name != self.settings.model_name:
            message = f"model is {name!r}, this server has {self.settings.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    @contextmanager
    def room(self, prompts: int, n: int) -> Iterator[None]:
        """Keep room for `n` outputs of each prompt during the block, which prepares and submits them.

        Raises:
            ApiError: there is none, now or ever, or the server is shutting down.
        """
        self._require_capacity(prompts, n)
        try:
            with self.engine.room(prompts * n):
                yield
        except QueueFull as error:
            headers = {"Retry-After": "1"}
            raise ApiError(429, f"{error}; try again", code="overloaded", headers=headers) from None
        except ShuttingDown as error:
            raise ApiError(503, str(error), code="shutting_down", headers={"Retry-After": "1"}) from None

    def _require_capacity(self, prompts: int, n: int) -> None:
        most = self.engine.most_requests
        if prompts * n > most:
            message = f"n is {n}, for {prompts} prompts; this server takes {most} outputs at a time"
            raise ApiError(400, message, param="n" if n > 1 else "prompt")

    def require_fitting_text(self, characters: int, field: str) -> None:
        """See that a prompt can fit before it is encoded, which takes long for a long text.

        Args:
            characters: of the text, or of a part of it.

        Raises:
            ApiError: whatever its tokens are, they are too many.
        """
        most = self.limits.max_characters
        if characters > most:
            tokens = self.llm.executor.max_seq_len
            message = f"{field} has {characters} characters; the model's {tokens} tokens cannot have more than {most}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def require_fitting_messages(self, messages: Sequence[ChatMessage]) -> None:
        """See that a conversation can fit before the chat template reads it.

        Raises:
            ApiError: it cannot.
        """
        self.require_fitting_text(sum(message.characters for message in messages), "messages")

    def require_room(self, prompt: Sequence[int], field: str) -> None:
        """See that a prompt fits.

        Raises:
            ApiError: it is longer than the engine's sequences.
        """
        limit = self.llm.executor.max_seq_len
        if len(prompt) >= limit:
            message = f"{field} has {len(prompt)} tokens; the model's {limit} leave room for {limit - 1} and an answer"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    def require_form(self, form: StructuredOutputs, field: str) -> None:
        """See that outputs can have a form.

        Args:
            field: of a request, which asks for it.

        Raises:
            InvalidField: they cannot.
        """
        try:
            self.llm.require_form(form)
        except InvalidForm as error:
            inside = error.place.removeprefix(".json") if field.endswith(".schema") else error.place
            raise InvalidField(field + inside, error.problem) from None

    def requests(
        self, prompts: Sequence[tuple[str, Prompt]], body: CommonRequest, form: StructuredOutputs | Lark | None
    ) -> list[Request]:
        """The engine's requests for prompts, each with the field that it came from; `n` for each.

        Args:
            form: of every output.

        Raises:
            ApiError, UserError: a prompt or a parameter cannot be.
        """
        params = body.sampling_params(self.defaults, form, self.vocab_size)
        timeout = self.settings.request_timeout
        return [
            self.llm.new_request(
                prompt,
                one,
                where=field,
                priority=body.priority or 0,
                deadline=None if timeout is None else time.monotonic() + timeout,
                verify_window=body.verify_window,
            )
            for field, prompt in prompts
            for one in params.each()
        ]
