"""Work that would hold the event loop, on threads; large requests have few of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from dflash_trt.serving.disconnect import while_connected

T = TypeVar("T")
_LARGE = 2**16
"""Bytes of a body from which on a request is large."""
_THREADS = 2
"""For large requests: what these take of processors, and of memory that an allocator keeps for each thread."""


class Workers:
    """Threads for requests' work before the engine's."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(_THREADS, "large-request")

    async def run(self, http: Request, work: Callable[[], T]) -> T:
        """The result of `work`, made on a thread; not begun where the client has gone by then.

        Args:
            http: whose body has been read, and has `http.state.body_size` bytes.

        Raises:
            ApiError: the client has gone.
        """
        threads = self._large if http.state.body_size >= _LARGE else None
        return await while_connected(http.receive, asyncio.get_running_loop().run_in_executor(threads, work))
