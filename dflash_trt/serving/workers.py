"""Work that would hold the event loop, on threads; large requests take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from dflash_trt.serving.disconnect import while_connected

T = TypeVar("T")
_LARGE = 2**16
"""Bytes of a body above which a request waits for its turn."""
_TURNS = 2
"""Large requests that are worked on at once: they leave threads and memory to the others."""


class Workers:
    """Threads for requests' work before and after the engine's."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(_TURNS)

    async def run(self, http: Request, work: Callable[[], T]) -> T:
        """The result of `work`, made on a thread; not begun where the client has gone by then.

        Args:
            http: whose body has been read, and has `http.state.body_size` bytes.

        Raises:
            ApiError: the client has gone.
        """
        return await while_connected(http.receive, self._in_turn(http.state.body_size, work))

    async def _in_turn(self, size: int, work: Callable[[], T]) -> T:
        if size <= _LARGE:
            return await asyncio.to_thread(work)
        async with self._turns:
            # What has begun goes on after a cancellation, and keeps its turn until it has ended.
            begun = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(begun)
            except asyncio.CancelledError:
                await asyncio.wait([begun])
                raise
