"""A server on a socket, from its start to its orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from dflash_trt.errors import UserError
from dflash_trt.serving.connection import Connection
from dflash_trt.serving.engine_thread import EngineThread

_THREADS = 64
"""That prepare requests. One may wait for another's form to be compiled; none that has no form does."""
_LAST_BYTES = 5
"""Seconds in which connections must take what was written to them, once all answers are made."""


def bind(host: str, port: int) -> socket.socket:
    """A socket for a server, which does not listen yet.

    Raises:
        UserError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--host {host} --port {port}: cannot be served at ({reason})") from None
    return bound


def serve(app: FastAPI, bound: socket.socket, *, drain_timeout: float, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let answers in flight end; a second signal ends the process at once.

    Args:
        app: of `create_app`.
        bound: of `bind`; closed in the end.
        drain_timeout: seconds after which answers in flight are cut.
        on_ready: called when clients can connect.

    Raises:
        BaseException: the engine failed, and this is why.
    """
    asyncio.run(_serve(app, bound, drain_timeout, on_ready))


def configuration(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves it."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_LAST_BYTES,
        server_header=False,
    )


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, bound: socket.socket, drain_timeout: float, on_ready: Callable[[], None]) -> None:
    engine: EngineThread = app.state.service.engine
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "request"))
    server = _Server(configuration(app))
    signalled = _signalled()
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        on_ready()
    events = [asyncio.create_task(event.wait()) for event in (signalled, engine.failed)]
    await asyncio.wait([serving, *events], return_when=asyncio.FIRST_COMPLETED)
    if signalled.is_set():
        await engine.drain(drain_timeout)
    server.should_exit = True
    await serving
    for event in events:
        event.cancel()
    if engine.failure is not None:
        raise engine.failure


def _signalled() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the next one does what it does to any process."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def begin_to_end() -> None:
        event.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin_to_end)
    return event
