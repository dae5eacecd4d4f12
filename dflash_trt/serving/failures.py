"""The answer to whatever nobody foresaw."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.serving.errors import ApiError, error_response
from dflash_trt.serving.request_id import request_id

_LOGGER = logging.getLogger(__name__)


class Failures:
    """Logs an exception with the name of its request, and answers with status 500 where nothing was answered yet.

    Starlette has one too, outside of all middleware: its answers lack the headers that middleware adds.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noticed)
        except Exception as error:
            if scope["type"] != "http" or begun:
                raise
            _LOGGER.exception("request %s failed", request_id(scope))
            failure = ApiError(500, f"internal error, {type(error).__name__}", code="internal_error")
            await error_response(failure)(scope, receive, send)
