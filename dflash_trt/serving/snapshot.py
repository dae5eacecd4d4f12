"""A scheduler as it is between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.runtime.request import Statistics
from dflash_trt.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class Snapshot:
    """What those who watch a server are told of its scheduler."""

    running: int
    """Requests in slots, their prompts under way or not."""
    waiting: int
    cached_tokens: int
    """Positions of slots that running requests fill."""
    window: int
    """Tokens that the last pass verified for a request, at most."""
    prefix_queries: int
    prefix_hits: int
    statistics: Statistics
    """Of all requests so far."""

    @classmethod
    def of(cls, scheduler: Scheduler, ended: Statistics) -> Snapshot:
        """Look at a scheduler, whose thread this is.

        Args:
            ended: what the requests that it no longer has add up to.
        """
        statistics, prefilling = Statistics(), scheduler.prefilling
        for each in (ended, *(request.statistics for request in scheduler.running)):
            statistics.add(each)
        return cls(
            running=len(scheduler.running) + (prefilling is not None),
            waiting=len(scheduler.waiting),
            cached_tokens=sum(request.kv_len for request in scheduler.running)
            + (prefilling.kv_len if prefilling is not None else 0),
            window=scheduler.window,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            statistics=statistics,
        )
