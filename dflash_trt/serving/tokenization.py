"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
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


class TokenizeRequest(Strict):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
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
        ids = await asyncio.to_thread(_encode, service, body)
        strings = [service.texts.text(token) for token in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.llm.executor.max_seq_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.require_model(body.model)
        if any(token >= service.vocab_size for token in body.tokens):
            raise UserError(f"tokens: its ids must be below {service.vocab_size}, the size of the vocabulary")
        return {"prompt": str(service.llm.tokenizer.decode(body.tokens))}

    return router


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    tokenizer = service.llm.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise UserError("prompt: give either prompt or messages")
    if body.messages is not None:
        return encode_messages(
            service.llm.tokenizer, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
    assert body.prompt is not None
    return encode_text(tokenizer, body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
