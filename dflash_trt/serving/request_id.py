"""A name for each request, in its response and in the log."""

from __future__ import annotations

import logging
import re
from secrets import token_hex

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOGGER = logging.getLogger(__name__)
REQUEST_ID = "X-Request-Id"
"""A header of requests and responses."""
_ACCEPTED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id(scope: Scope) -> str:
    """What `RequestIds` calls a request."""
    return str(scope.get("state", {}).get("request_id", "unknown"))


class RequestIds:
    """Calls each request as its client does, where that is a plain word, else by a name of its own.

    Each response says it. The log has it at level INFO.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _ACCEPTED.fullmatch(given) else token_hex(16)
        scope.setdefault("state", {})["request_id"] = name

        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = name
                _LOGGER.info("%s %s %r: %d", name, scope["method"], scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, send_with_name)
