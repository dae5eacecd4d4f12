"""The page at `/`: a chat that shows how each token came."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse


def page_router() -> APIRouter:
    """The page, which may run its own script and style, and connect to this server; nothing else."""
    html = (files("dflash_trt.serving") / "page.html").read_text(encoding="utf-8")
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


def _hash_of(tag: str, html: str) -> str:
    """What a policy names the one inline script or style by."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
