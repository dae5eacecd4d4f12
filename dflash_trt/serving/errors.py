"""Whatever goes wrong, as the body in which OpenAI's clients expect it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from dflash_trt.errors import UserError
from dflash_trt.serving.invalid_field import InvalidField

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""Other mistakes are "invalid_request_error"."""
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\]|\.\w+)*)(?:: | is | gives )")
"""How the message of a `UserError` begins that is about a field."""


class ApiError(HTTPException):
    """A refusal.

    Args:
        status: of HTTP.
        message: for the client; made one line, whatever of the request is in it.
        param: the field at fault.
        code: what programs tell errors of one status apart by.
        headers: to be sent with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, " ".join(message.split()), headers)
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent, as a response or in a stream."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    @classmethod
    def of(cls, error: UserError) -> ApiError:
        """The refusal of a request that asks for what cannot be."""
        if isinstance(error, InvalidField):
            return cls(400, str(error), param=error.field)
        field = _FIELD.match(str(error))
        return cls(400, str(error), param=field[1] if field else None)

    @classmethod
    def of_body(cls, error: ValidationError, body: Any) -> ApiError:
        """The refusal of a body with a field that is wrong: the one that comes closest to being right."""
        mistakes = error.errors(include_url=False, include_input=False, include_context=False)
        found = max(mistakes, key=lambda each: _progress(each, body))
        path = _path(found, body)
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
        return cls(400, f"{param or 'body'}: {found['msg']}", param=param or None)


def answer_errors(app: FastAPI) -> None:
    """Let an app answer refusals in OpenAI's body."""
    app.add_exception_handler(UserError, _refuse_request)
    app.add_exception_handler(HTTPException, _answer_status)


def error_response(error: ApiError) -> JSONResponse:
    """The response that tells a client of an error."""
    return JSONResponse(error.body, error.status_code, error.headers)


async def _refuse_request(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, UserError)
    return error_response(ApiError.of(error))


async def _answer_status(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error_response(error)
    reason = HTTPStatus(error.status_code).phrase
    code = "_".join(reason.lower().split())
    message = f"{request.method} {request.url.path}: {reason.lower()}"
    return error_response(ApiError(error.status_code, message, code=code, headers=error.headers))


def _progress(mistake: Mapping[str, Any], body: Any) -> tuple[int, int]:
    """How far a body was right: where a field may have several types, each finds its mistakes, the closest the last."""
    path = _path(mistake, body)
    index = path[-1] if path and isinstance(path[-1], int) else 0
    return len(path), index


def _path(mistake: Mapping[str, Any], body: Any) -> list[int | str]:
    """Names and indices in the body; pydantic puts the types it tried between and behind them."""
    path: list[int | str] = []
    location, is_missing = mistake["loc"], mistake["type"] == "missing"
    for part in location:
        if isinstance(part, str):
            inside = isinstance(body, dict) and (part in body or (is_missing and part == location[-1]))
        else:
            inside = isinstance(body, list) and part < len(body)
        if inside:
            path.append(part)
            body = body.get(part) if isinstance(body, dict) else body[int(part)]
    return path
