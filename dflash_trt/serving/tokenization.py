"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from dflash_trt.checkpoint.encoding import encode_text
from dflash_trt.errors import UserError
from dflash_trt.serving.chat_protocol import ChatMessage, Tool
from dflash_trt.serving.conversation import encode_messages
from dflash_trt.serving.json_body import JsonRoute
from dflash_trt.serving.protocol import Items, Strict, TokenId
from dflash_trt.serving.service import Service
from dflash_trt.serving.tools import read_tool_use


class TokenizeRequest(Strict):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Items[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: Items[TokenId]


def tokenization_router(service: Service) -> APIRouter:
    """Both endpoints."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.require_model(body.model)
        return await asyncio.to_thread(_tokenize, service, body)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.require_model(body.model)
        if any(token >= service.vocab_size for token in body.tokens):
            raise UserError(f"tokens: its ids must be below {service.vocab_size}, the size of the vocabulary")
        return {"prompt": str(await asyncio.to_thread(service.llm.tokenizer.decode, body.tokens))}

    return router


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
        return encode_messages(
            tokenizer,
            body.messages,
            body.add_generation_prompt is not False,
            body.chat_template_kwargs,
            _definitions(service, body),
        )
    if body.prompt is None or body.messages is not None:
        raise UserError("prompt: give either prompt or messages")
    for name in ("tools", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise UserError(f"{name} is given, which goes with messages")
    return encode_text(tokenizer, body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)


def _definitions(service: Service, body: TokenizeRequest) -> Sequence[Mapping[str, Any]] | None:
    """Of tools, as a completion's prompt would show them."""
    use = read_tool_use([tool.model_dump(exclude_none=True) for tool in body.tools or ()], None, None)
    service.formats(use).require_tools(use)
    return use.definitions
