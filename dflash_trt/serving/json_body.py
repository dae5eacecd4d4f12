"""Request bodies: JSON, nothing that only looks like it, and no more of it than a request needs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from dflash_trt.errors import UserError
from dflash_trt.serving.errors import ApiError
from dflash_trt.serving.json_shape import json_shape
from dflash_trt.serving.limits import RequestLimits
from dflash_trt.serving.service import Service
from dflash_trt.serving.unknown_fields import header, ignored_fields

IGNORED_FIELDS = "X-Ignored-Fields"
"""A header of responses, where a request has such fields."""
_SMALL = 2**14
"""Bytes that are read in less time than a thread takes to begin."""
_MAX_DEPTH = 128
"""Twice what a schema may have; a parser calls itself at each level."""


class JsonRoute(APIRoute):
    """A route whose body must be JSON, said to be so: no page of another site can send that.

    Its endpoints find a `Service` as their application's `state.service`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, for a request that reads its body strictly."""
        handle = super().get_route_handler()
        assert self.body_field is not None
        kind = self.body_field.field_info.annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)

        async def handle_strictly(http: Request) -> Response:
            request = _StrictRequest(http, kind, http.app.state.service)
            response = await handle(request)
            if request.ignored:
                response.headers[IGNORED_FIELDS] = header(request.ignored)
            return response

        return handle_strictly


class _StrictRequest(Request):
    """Gives FastAPI a body that is already made, and validated, on a thread where that takes long."""

    def __init__(self, http: Request, kind: type[BaseModel], service: Service) -> None:
        super().__init__(http.scope, http.receive)
        self.ignored: list[str] = []
        self._kind = kind
        self._service = service
        self._content = b""

    async def body(self) -> bytes:
        """Reads it, and returns a stand-in: FastAPI keeps what this returns until the answer is made."""
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(
                415, f"Content-Type is {content_type!r}, it must be application/json", code="unsupported_media_type"
            )
        self._content = b"".join([piece async for piece in self.stream()])
        self.state.body_size = len(self._content)
        return b"{}"

    async def json(self) -> BaseModel:
        """The body as the endpoint's model."""
        content, self._content = self._content, b""
        if len(content) <= _SMALL:
            model, self.ignored = self._read(content)
        else:
            model, self.ignored = await self._service.workers.run(self, lambda: self._read(content))
        self._service.ignored_fields.note(self.ignored)
        return model

    def _read(self, content: bytes) -> tuple[BaseModel, list[str]]:
        value = _parse(content, self._service.limits)
        try:
            model = self._kind.model_validate(value, context=self._service.limits)
            peers = getattr(self._kind, "peer_fields", {})
            return model, ignored_fields(model, value, peers, strict=self._service.settings.strict_fields)
        except ValidationError as error:
            raise ApiError.of_body(error, value) from None
        except UserError as error:
            raise ApiError.of(error) from None


def _parse(content: bytes, limits: RequestLimits) -> Any:
    shape = json_shape(content)
    if shape.depth > _MAX_DEPTH:
        message = f"the body has {shape.depth} lists and objects in one another; it may have {_MAX_DEPTH}"
        raise ApiError(400, message, code="body_too_deep")
    if shape.values > limits.max_values:
        message = f"the body has {shape.values} JSON values; it may have {limits.max_values}"
        raise ApiError(413, message, code="body_too_large")
    try:
        # Python's own reader takes NaN, lone surrogates and any depth.
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
