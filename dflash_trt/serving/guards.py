"""What stands before every endpoint: keys, and limits on bodies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.errors import ApiError, error_response

_GUARDED = ("/v1", "/tokenize", "/detokenize")
_BODY_SECONDS = 60.0
"""In which a body must have come, the whole of it."""


class KeyGuard:
    """Lets nobody without a key to the API; health, metrics, the description of the API and the page are open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED) and not self._opens(Headers(scope=scope)):
            headers = {"WWW-Authenticate": "Bearer"}
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=headers)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Each is compared, and in constant time: how long it takes tells nothing of the keys.
        matches = [secrets.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies that are too long, or too long on their way."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            await error_response(self._too_long())(scope, receive, send)
            return
        await self._app(scope, _LimitedBody(receive, self._max_bytes, self._too_long()), send)

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_bytes} bytes", code="body_too_large")


class _LimitedBody:
    def __init__(self, receive: Receive, max_bytes: int, too_long: ApiError) -> None:
        self._receive = receive
        self._left = max_bytes
        self._too_long = too_long
        self._deadline = time.monotonic() + _BODY_SECONDS
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._deadline - time.monotonic())
        except asyncio.TimeoutError:
            took, headers = f"the body took longer than {_BODY_SECONDS:g} s", {"Connection": "close"}
            raise ApiError(408, took, code="body_timeout", headers=headers) from None
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise self._too_long
        self._is_whole = not message.get("more_body", False)
        return message
