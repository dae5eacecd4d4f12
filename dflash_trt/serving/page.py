"""The page at `/`: a chat that shows how each token came."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from dflash_trt.checkpoint.example_prompts import read_example_prompts
from dflash_trt.serving.service import Service

_CHAT_PROMPTS = (
    "Write a Python function that merges two sorted lists.",
    "A train travels 180 km in 2.5 hours. What is its average speed?",
    "Explain in three sentences why the sky is blue.",
)
"""For any model that was trained to answer, where its drafter brings none of its own."""
_TEXT_PROMPTS = ("def fibonacci(n):", "Once upon a time", "The three primary colours are")
"""As `_CHAT_PROMPTS`, for models that only continue a text."""
_OFFERED = 4
"""Prompts that the page has room for."""


def page_router(service: Service) -> APIRouter:
    """The page, which may run its own script and style, and connect to this server; nothing else.

    Raises:
        UserError: the engine's example prompts cannot be read.
    """
    html = (files("dflash_trt.serving") / "page.html").read_text(encoding="utf-8")
    html = html.replace("{{engine}}", json.dumps(_told(service)).replace("<", r"\u003c"))  # "</script>" would end it
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of('script', html)}",
            f"style-src {_hash_of('style', html)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return router


def _told(service: Service) -> dict[str, Any]:
    """What the page knows of the engine and the server from the start. None of it is secret: no key opens the page."""
    has_template = service.llm.tokenizer.chat_template is not None
    prompts = read_example_prompts(service.llm.engine.path) or (_CHAT_PROMPTS if has_template else _TEXT_PROMPTS)
    return {
        "model": service.settings.model_name,
        "chat": has_template,
        "max_seq_len": service.llm.executor.max_seq_len,
        "block_size": service.llm.executor.max_window,
        "verify_window": service.settings.verify_window,
        "needs_key": bool(service.settings.api_keys),
        "prompts": prompts[:_OFFERED],
    }


def _hash_of(tag: str, html: str) -> str:
    """What a policy names the one inline script or style by."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
