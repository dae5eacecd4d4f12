"""What the engine makes for one call, read while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Emission


class ShuttingDown(Exception):
    """No request is taken any more, or the engine has ended."""


@dataclass(frozen=True)
class Progress:
    """What one or more steps made of some requests."""

    emissions: list[Emission]
    ended: list[Request]
    window: int = 0
    """Tokens that the pass of one step verified for a request, at most; 0 where that is not told."""
    at: float = 0.0
    """When that step ended, in `time.monotonic`'s seconds."""


class Answer:
    """The requests of one call while the engine makes their output: iterate it until all have ended.

    What its reader has not taken yet is held here, at most the requests' own tokens.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._to_come = len(requests)
        self._held = Progress([], [])
        self._changed = asyncio.Event()
        self._given_up = False

    @property
    def is_read(self) -> bool:
        """Nothing follows what was given last."""
        return self._to_come == 0

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Progress:
        """All that came since the last time.

        Raises:
            ShuttingDown: the engine has ended before them.
        """
        while not self._held.emissions and not self._held.ended:
            if self._to_come == 0:
                raise StopAsyncIteration
            if self._given_up:
                raise ShuttingDown("the engine has ended")
            self._changed.clear()
            await self._changed.wait()
        progress, self._held = self._held, Progress([], [])
        self._to_come -= len(progress.ended)
        return progress

    def emit(self, emission: Emission) -> None:
        """One of its requests emitted a token."""
        self._held.emissions.append(emission)
        self._changed.set()

    def end(self, request: Request) -> None:
        """One of its requests ended."""
        self._held.ended.append(request)
        self._changed.set()

    def give_up(self) -> None:
        """Nothing more will come."""
        self._given_up = True
        self._changed.set()
