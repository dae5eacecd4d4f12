"""`/v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.call import Call, Choice, sources
from dflash_trt.serving.chat_protocol import ChatRequest, NamedTool, template_variables
from dflash_trt.serving.conversation import encode_messages
from dflash_trt.serving.formats import AnswerParser, Deltas, ParsedAnswer
from dflash_trt.serving.json_body import JsonRoute
from dflash_trt.serving.service import Service
from dflash_trt.serving.streaming import respond
from dflash_trt.serving.tokens import TokenTexts
from dflash_trt.serving.tools import read_tool_use

_TAIL = 16
"""Tokens of a prompt that tell whether the model thinks first."""


class ChatChoice(Choice):
    """An assistant's turn: content, and what the model's family keeps apart from it."""

    def __init__(
        self, index: int, request: Request, body: ChatRequest, parser: AnswerParser, texts: TokenTexts
    ) -> None:
        super().__init__(index, request)
        self._body = body
        self._parser = parser
        self._texts = texts

    @property
    def _finish_reason(self) -> str | None:
        """A tool call is an end of its own where the model ended by itself."""
        reason = self.request.finish_reason
        return "tool_calls" if reason == "stop" and self._parser.called else reason

    @property
    def _cut(self) -> bool:
        return self.request.finish_reason == "length"

    def begin(self) -> dict[str, Any] | None:
        """See `Choice.begin`."""
        return self._chunk({"role": "assistant", "content": ""}, [])

    def advance(self, emissions: Sequence[Emission]) -> dict[str, Any] | None:
        """See `Choice.advance`."""
        self.emitted += len(emissions)
        delta = self._delta(self._parser.push("".join(emission.text for emission in emissions)))
        if not delta and not self._body.return_token_sources and not self._body.logprobs:
            return None
        return self._chunk(delta, emissions)

    def finish(self) -> list[dict[str, Any]]:
        """See `Choice.finish`."""
        rest = self._delta(self._parser.finish(cut=self._cut))
        last = {**self._chunk({}, []), "finish_reason": self._finish_reason}
        return [self._chunk(rest, []), last] if rest else [last]

    def whole(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """See `Choice.whole`."""
        self.emitted = len(emissions)
        parsed = ParsedAnswer()
        parsed.add(self._parser.push("".join(emission.text for emission in emissions)))
        parsed.add(self._parser.finish(cut=self._cut))
        content = None if parsed.tool_calls and not parsed.content else parsed.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning and self._body.include_reasoning is not False:
            message["reasoning"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        return {
            "index": self.index,
            "message": message,
            **self._of_tokens(emissions),
            "finish_reason": self._finish_reason,
        }

    def _delta(self, deltas: Deltas) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if deltas.reasoning and self._body.include_reasoning is not False:
            delta["reasoning"] = deltas.reasoning
        if deltas.content:
            delta["content"] = deltas.content
        if deltas.tool_calls:
            delta["tool_calls"] = [call.to_dict() for call in deltas.tool_calls]
        return delta

    def _chunk(self, delta: dict[str, Any], emissions: Sequence[Emission]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, **self._of_tokens(emissions), "finish_reason": None}

    def _of_tokens(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if self._body.logprobs and emissions:
            found["logprobs"] = self._texts.in_chat(emissions)
        if self._body.return_token_sources:
            found["token_sources"] = sources(emissions)
        return found


def chat_router(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: HttpRequest) -> Response:
        return await respond(http, service, body, partial(_prepare, service, body))

    return router


def _prepare(service: Service, body: ChatRequest) -> Call:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    use = read_tool_use(tools, choice, body.parallel_tool_calls)
    service.require_fitting_messages(body.messages)
    tokenizer = service.llm.tokenizer
    ids = encode_messages(
        tokenizer,
        body.messages,
        body.add_generation_prompt is not False,
        template_variables(body.chat_template_kwargs, body.reasoning_effort),
        use.definitions,
    )
    service.require_room(ids, "messages")
    form = body.asked_form()
    if form is not None:
        service.require_form(form, body.form_field)
    answers = service.formats(use).answer_format(use, str(tokenizer.decode(ids[-_TAIL:])), form)
    requests = service.requests([("messages", ids)], body, answers.structured_outputs)
    return Call(
        body,
        [ChatChoice(i, request, body, answers.new_parser(), service.texts) for i, request in enumerate(requests)],
        model=service.settings.model_name,
        prefix="chatcmpl",
        names=("chat.completion", "chat.completion.chunk"),
    )
