"""Clients that go away while something is made for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Receive

from dflash_trt.serving.errors import ApiError

T = TypeVar("T")


@contextmanager
def watching(receive: Receive, when_gone: Callable[[], object]) -> Iterator[None]:
    """Call `when_gone` if the client goes away during the block; its body has been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        when_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled where the client goes away.

    Raises:
        ApiError: it has gone; nobody reads this.
    """
    task = asyncio.ensure_future(work)
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = task.cancel()

    try:
        with watching(receive, cancel):
            return await task
    except asyncio.CancelledError:
        task.cancel()
        if not gone:
            raise
        raise ApiError(499, "the client has gone away", code="client_disconnected") from None
