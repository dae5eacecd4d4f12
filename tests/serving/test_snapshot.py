"""What is told of a scheduler, against what was put into it."""

from __future__ import annotations

from dflash_trt.runtime.request import Statistics
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from dflash_trt.serving.snapshot import Snapshot
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import request


def test_running_waiting_and_cached() -> None:
    """Two slots and chunks of four tokens: one request decodes, one is in its prompt, one waits."""
    scheduler = Scheduler(SimulatedExecutor(2), FixedWindow(2), reuse_prefixes=True)
    scheduler.add([request([10, 11, 12], 40), request([20 + i for i in range(12)], 40), request([30], 40)])
    for _ in range(2):
        scheduler.step()
    snapshot = Snapshot.of(scheduler, Statistics())
    (running,) = scheduler.running
    assert (snapshot.running, snapshot.waiting, snapshot.window) == (2, 1, 2)
    assert snapshot.cached_tokens == len(running.tokens) - 1 + 4
    assert (snapshot.prefix_queries, snapshot.prefix_hits) == (3 + 12, 0)


def test_statistics_are_of_all_so_far() -> None:
    scheduler, ended = Scheduler(SimulatedExecutor(2), FixedWindow(3)), Statistics()
    requests = [request([10 + i], 3 + 9 * i) for i in range(3)]
    scheduler.add(requests)
    told = []
    while not scheduler.idle:
        scheduler.step()
        for one in scheduler.ended:
            ended.add(one.statistics)
        told.append(Snapshot.of(scheduler, ended).statistics.output_tokens)
    assert told == sorted(told) and told[-1] == sum(len(one.output) for one in requests)
    last = Snapshot.of(scheduler, ended)
    assert (last.running, last.waiting, last.cached_tokens) == (0, 0, 0)
    assert last.statistics.drafts > 0
