"""Answers, whole or as server-sent events while they are made; a client that goes away ends its requests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import groupby
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dflash_trt.serving.answer import Answer, Progress, ShuttingDown
from dflash_trt.serving.call import Call, require_end
from dflash_trt.serving.disconnect import watching
from dflash_trt.serving.engine_thread import EngineThread
from dflash_trt.serving.errors import ApiError
from dflash_trt.serving.protocol import CommonRequest
from dflash_trt.serving.service import Service

_LOGGER = logging.getLogger(__name__)
_DONE = "data: [DONE]\n\n"


async def respond(http: HttpRequest, service: Service, body: CommonRequest, prepare: Callable[[], Call]) -> Response:
    """Answer a client.

    Args:
        prepare: makes a call of the body; on a thread, and only where there is room for its requests.

    Raises:
        ApiError: the call is refused, or its requests did not end by themselves.
        UserError: the body asks for what cannot be.
    """
    service.require_model(body.model)
    engine = service.engine
    with service.room(body.prompt_count, body.n or 1):
        call = await service.workers.run(http, prepare)
        answer = engine.submit([choice.request for choice in call.choices])
    if body.stream:
        return _EventStream(engine, answer, call)
    with engine.answering(answer), watching(http.receive, lambda: engine.cancel(answer)):
        try:
            emissions = await call.emissions(answer)
            # On a thread: alternatives of thousands of tokens take a while to put together.
            return await asyncio.to_thread(lambda: JSONResponse(call.whole(emissions)))
        except ShuttingDown as error:
            raise ApiError(500, str(error), code="engine_failed") from None


class _EventStream(StreamingResponse):
    """Leaves its answer whether or not it was ever sent."""

    def __init__(self, engine: EngineThread, answer: Answer, call: Call) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(answer, call), media_type="text/event-stream", headers=headers)
        self._engine = engine
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cancel = lambda: self._engine.cancel(self._answer)  # noqa: E731
        with self._engine.answering(self._answer), watching(receive, cancel):
            await self.stream_response(send)


async def _events(answer: Answer, call: Call) -> AsyncIterator[str]:
    """All events that are ready, together: to write costs more than what is written."""
    events: list[str] = []
    try:
        async for progress in answer:
            for choice in _choices(call, progress):
                events.append(_event(call.chunk([choice])))
            if events and not answer.is_read:
                yield "".join(events)
                events.clear()
        if (last := call.last_chunk()) is not None:
            events.append(_event(last))
    except ApiError as error:
        events.append(_event(error.body))
    except ShuttingDown as error:
        events.append(_event(ApiError(500, str(error), code="engine_failed").body))
    except Exception as error:
        # The response has begun: this is all that can still be told.
        _LOGGER.exception("a stream failed")
        events.append(_event(ApiError(500, f"internal error, {type(error).__name__}", code="internal_error").body))
    yield "".join((*events, _DONE))


def _choices(call: Call, progress: Progress) -> Iterator[dict[str, Any]]:
    """What chunks say of progress."""
    for request, emissions in groupby(sorted(progress.emissions, key=_index(call)), key=lambda each: each.request):
        choice = call.choice_of(request)
        said = [choice.begin() if choice.emitted == 0 else None, choice.advance(list(emissions))]
        yield from (each for each in said if each is not None)
    for request in progress.ended:
        require_end(request)
        yield from call.choice_of(request).finish()


def _index(call: Call) -> Callable[[Any], int]:
    return lambda emission: call.choice_of(emission.request).index


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
