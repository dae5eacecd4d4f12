"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse
from pydantic import Field, ValidationInfo, field_validator

from dflash_trt.checkpoint.encoding import encode_text
from dflash_trt.errors import UserError
from dflash_trt.serving.chat_protocol import ChatMessage, Tool, require_few_messages, template_variables
from dflash_trt.serving.conversation import encode_messages
from dflash_trt.serving.json_body import JsonRoute
from dflash_trt.serving.peer_fields import PROMPT_FIELDS, PeerField
from dflash_trt.serving.protocol import Items, Strict, TokenId, Variables
from dflash_trt.serving.service import Service
from dflash_trt.serving.tools import read_tool_use


class TokenizeRequest(Strict):
    """A text, or a conversation."""

    peer_fields: ClassVar[Mapping[str, PeerField]] = PROMPT_FIELDS

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Items[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: str | None = None
    tools: Items[Tool] | None = None
    return_token_strs: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _require_few(cls, value: Any, info: ValidationInfo) -> Any:
        return require_few_messages(value, info)


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: Items[TokenId]


def tokenization_router(service: Service) -> APIRouter:
    """Both endpoints."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> Response:
        service.require_model(body.model)
        return await service.workers.run(http, lambda: JSONResponse(_tokenize(service, body)))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: HttpRequest) -> Response:
        service.require_model(body.model)
        return await service.workers.run(http, lambda: JSONResponse(_detokenize(service, body)))

    return router


def _detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    if any(token >= service.vocab_size for token in body.tokens):
        raise UserError(f"tokens: its ids must be below {service.vocab_size}, the size of the vocabulary")
    return {"prompt": str(service.llm.tokenizer.decode(body.tokens))}


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    ids = _encode(service, body)
    return {
        "count": len(ids),
        "max_model_len": service.llm.executor.max_seq_len,
        "tokens": ids,
        "token_strs": [service.texts.text(token) for token in ids] if body.return_token_strs else None,
    }


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    tokenizer = service.llm.tokenizer
    if body.messages is not None and body.prompt is None:
        service.require_fitting_messages(body.messages)
        return encode_messages(
            tokenizer,
            body.messages,
            body.add_generation_prompt is not False,
            template_variables(body.chat_template_kwargs, body.reasoning_effort),
            _definitions(service, body),
        )
    if body.prompt is None or body.messages is not None:
        raise UserError("prompt: give either prompt or messages")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise UserError(f"{name} is given, which goes with messages")
    service.require_fitting_text(len(body.prompt), "prompt")
    return encode_text(tokenizer, body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)


def _definitions(service: Service, body: TokenizeRequest) -> Sequence[Mapping[str, Any]] | None:
    """Of tools, as a completion's prompt would show them."""
    use = read_tool_use([tool.model_dump(exclude_none=True) for tool in body.tools or ()], None, None)
    service.formats(use).require_tools(use)
    return use.definitions
