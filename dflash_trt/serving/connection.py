"""A client's connection, which ends where the client does nothing: sends no request, or takes no answer."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_SECONDS = 30.0
"""In which the head of a request must have come, the whole of it."""
_SEND_SECONDS = 30.0
"""In which a client must take something of what is written to it."""


class Connection(H11Protocol):
    """Uvicorn's, without a buffer of its own beside the socket's: what is not sent is waited for."""

    _check: asyncio.TimerHandle | None = None
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop, as are all others."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of it."""
        super().connection_lost(exc)
        self._stop_checking()
        self._stop_expecting()

    def data_received(self, data: bytes) -> None:
        """Something came; uvicorn waits for ever for the rest of a head, or of a body that nobody reads."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        else:
            self._stop_expecting()

    def pause_writing(self) -> None:
        """Something has not been taken."""
        super().pause_writing()
        self._check_later()

    def resume_writing(self) -> None:
        """All of it has."""
        super().resume_writing()
        self._stop_checking()

    def _expect_head(self) -> None:
        if self._head is None:
            self._head = self.loop.call_later(_HEAD_SECONDS, self.transport.abort)

    def _stop_expecting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _check_later(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._check = self.loop.call_later(_SEND_SECONDS, self._end_unless_below, left)

    def _stop_checking(self) -> None:
        if self._check is not None:
            self._check.cancel()

    def _end_unless_below(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._check_later()
        else:
            self.transport.abort()
