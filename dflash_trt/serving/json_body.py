"""Request bodies: JSON, and nothing that only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from dflash_trt.serving.errors import ApiError


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, must be JSON, said to be so: no page of another site can send that."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, for a request that reads its body strictly."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def body(self) -> bytes:
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(
                415, f"Content-Type is {content_type!r}, it must be application/json", code="unsupported_media_type"
            )
        return await super().body()

    async def json(self) -> Any:
        """Python's own reader takes NaN, lone surrogates and any depth."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
