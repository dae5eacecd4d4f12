"""Requests that wait for a slot, in the order in which they get one."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from itertools import count

from dflash_trt.runtime.request import Request


class WaitingQueue:
    """Lower priority numbers first; of one number, first come, first served."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._arrivals = count()
        self._earliest_deadline = math.inf

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        """Add a request behind those that came before."""
        heappush(self._heap, (request.priority, next(self._arrivals), request))
        if request.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, request.deadline)

    def pop(self) -> Request:
        """Take the one whose turn it is."""
        return heappop(self._heap)[2]

    def pop_short(self, length: int, priority: int) -> Request | None:
        """Take the first whose prompt is no longer, and whose number no higher, than that; looks at every one."""
        short = (each for each in self._heap if each[0] <= priority and each[2].prompt_length <= length)
        entry = min(short, default=None)
        if entry is None:
            return None
        self._heap.remove(entry)
        heapify(self._heap)
        return entry[2]

    def has_late(self, now: float) -> bool:
        """A deadline may have come, of one that waits or of one that has left since."""
        return now >= self._earliest_deadline

    def remove_ended(self, now: float) -> list[Request]:
        """Take out those that have ended, and end those that are late; looks at every one."""
        for _, _, request in self._heap:
            request.end_if_late(now)
        ended = [request for _, _, request in self._heap if request.finish_reason is not None]
        self._heap = [entry for entry in self._heap if entry[2].finish_reason is None]
        heapify(self._heap)
        deadlines = (request.deadline for _, _, request in self._heap)
        self._earliest_deadline = min((each for each in deadlines if each is not None), default=math.inf)
        return ended
