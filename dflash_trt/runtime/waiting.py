"""Requests that wait for a slot, in the order in which they get one."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from dflash_trt.runtime.request import Request

_Entry = tuple[int, int, Request]
"""Priority, arrival, and who."""


class WaitingQueue:
    """Lower priority numbers first; of one number, first come, first served.

    Those whose prompts are short are found without a look at the others.
    """

    def __init__(self) -> None:
        self._short: list[_Entry] = []
        self._others: list[_Entry] = []
        self._arrivals = count()
        self._earliest_deadline = math.inf

    def __len__(self) -> int:
        return len(self._short) + len(self._others)

    def push(self, request: Request, *, is_short: bool) -> None:
        """Add a request behind those that came before."""
        heappush(self._short if is_short else self._others, (request.priority, next(self._arrivals), request))
        if request.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, request.deadline)

    @property
    def first(self) -> Request:
        """The one whose turn it is."""
        return self._heap_of_first[0][2]

    def pop(self) -> Request:
        """Take that one."""
        return heappop(self._heap_of_first)[2]

    @property
    def _heap_of_first(self) -> list[_Entry]:
        return min((heap for heap in (self._short, self._others) if heap), key=lambda heap: heap[0])

    def pop_short(self, priority: int, is_short: Callable[[Request], bool]) -> Request | None:
        """Take the first of those that came short, and still are, whose number is no higher than that.

        One that is short no more is one of the others from then on, so that none is looked at again and again.
        """
        while self._short and self._short[0][0] <= priority:
            entry = heappop(self._short)
            if is_short(entry[2]):
                return entry[2]
            heappush(self._others, entry)
        return None

    def has_late(self, now: float) -> bool:
        """A deadline may have come, of one that waits or of one that has left since."""
        return now >= self._earliest_deadline

    def remove_ended(self, now: float) -> list[Request]:
        """Take out those that have ended, and end those that are late; looks at every one."""
        ended: list[Request] = []
        left: list[Request] = []
        for heap in (self._short, self._others):
            for _, _, request in heap:
                request.end_if_late(now)
                (left if request.finish_reason is None else ended).append(request)
            heap[:] = [entry for entry in heap if entry[2].finish_reason is None]
            heapify(heap)
        deadlines = (request.deadline for request in left)
        self._earliest_deadline = min((each for each in deadlines if each is not None), default=math.inf)
        return ended
