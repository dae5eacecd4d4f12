"""`/v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.call import Call, Choice, sources
from dflash_trt.serving.chat_protocol import ChatRequest
from dflash_trt.serving.conversation import encode_messages
from dflash_trt.serving.json_body import JsonRoute
from dflash_trt.serving.service import Service
from dflash_trt.serving.streaming import respond
from dflash_trt.serving.tokens import TokenTexts


class ChatChoice(Choice):
    """An assistant's turn."""

    def __init__(self, index: int, request: Request, body: ChatRequest, texts: TokenTexts) -> None:
        super().__init__(index, request)
        self._body = body
        self._texts = texts

    def begin(self) -> dict[str, Any] | None:
        """See `Choice.begin`."""
        return self._chunk({"role": "assistant", "content": ""}, [])

    def advance(self, emissions: Sequence[Emission]) -> dict[str, Any] | None:
        """See `Choice.advance`."""
        self.emitted += len(emissions)
        text = "".join(emission.text for emission in emissions)
        if not text and not self._body.return_token_sources and not self._body.logprobs:
            return None
        return self._chunk({"content": text}, emissions)

    def finish(self) -> list[dict[str, Any]]:
        """See `Choice.finish`."""
        return [{**self._chunk({}, []), "finish_reason": self.request.finish_reason}]

    def whole(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """See `Choice.whole`."""
        self.emitted = len(emissions)
        message = {"role": "assistant", "content": "".join(emission.text for emission in emissions), "refusal": None}
        return {
            "index": self.index,
            "message": message,
            **self._of_tokens(emissions),
            "finish_reason": self.request.finish_reason,
        }

    def _chunk(self, delta: dict[str, Any], emissions: Sequence[Emission]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, **self._of_tokens(emissions), "finish_reason": None}

    def _of_tokens(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if self._body.logprobs and emissions:
            entries = [(each.token, each.logprobs) for each in emissions if each.logprobs is not None]
            found["logprobs"] = {"content": [self._texts.chat_entry(*entry) for entry in entries], "refusal": None}
        if self._body.return_token_sources:
            found["token_sources"] = sources(emissions)
        return found


def chat_router(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: HttpRequest) -> Response:
        service.require_model(body.model)
        call = await asyncio.to_thread(_prepare, service, body)
        answer = service.submit([choice.request for choice in call.choices])
        return await respond(http, service.engine, answer, call)

    return router


def _prepare(service: Service, body: ChatRequest) -> Call:
    ids = encode_messages(service.llm.tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    service.require_room(ids, "messages")
    requests = service.requests([("messages", ids)], body)
    return Call(
        body,
        [ChatChoice(index, request, body, service.texts) for index, request in enumerate(requests)],
        model=service.settings.model_name,
        prefix="chatcmpl",
        names=("chat.completion", "chat.completion.chunk"),
    )
