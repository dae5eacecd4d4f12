"""What stands before every endpoint: keys, HEAD, and limits on bodies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

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


class HeadAsGet:
    """Answers HEAD as GET, without a body: what probes and proxies ask a server that they do not know."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_no_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_no_body)


class BodyLimit:
    """Refuses bodies that are too long, or too long on their way, and those that there is no memory for.

    Args:
        max_size: bytes of one body.
        max_held: bytes of all bodies whose requests are not answered.
    """

    def __init__(self, app: ASGIApp, max_size: int, max_held: int) -> None:
        self._app = app
        self._max_size = max_size
        self._free = max_held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_size:
            await error_response(self._too_long())(scope, receive, send)
            return
        body = _LimitedBody(receive, self._take)
        try:
            await self._app(scope, body, send)
        finally:
            self._free += body.size

    def _take(self, size: int, more: int) -> None:
        """Make room for `more` bytes of a body that had `size`."""
        if size + more > self._max_size:
            raise self._too_long()
        if more > self._free:
            headers = {"Retry-After": "1"}
            raise ApiError(429, "too many long requests are open; try again", code="overloaded", headers=headers)
        self._free -= more

    def _too_long(self) -> ApiError:
        message = f"the body is longer than {self._max_size} bytes, this server's --max_body_size"
        return ApiError(413, message, code="body_too_large")


class _LimitedBody:
    def __init__(self, receive: Receive, take: Callable[[int, int], None]) -> None:
        self.size = 0
        """Bytes so far."""
        self._receive = receive
        self._take = take
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
        more = len(message.get("body", b""))
        self._take(self.size, more)
        self.size += more
        self._is_whole = not message.get("more_body", False)
        return message
