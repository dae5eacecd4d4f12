"""Ranks of an engine as threads of this process, which meet as processes do and start in no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.distributed import HashStore

from dflash_trt.engine.directory import Engine
from dflash_trt.ops.ranks import Ranks
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.load import load_executor
from dflash_trt.runtime.parallel_executor import ParallelExecutor, serve
from dflash_trt.runtime.rank_group import connect

CPU = torch.device("cpu")


def parallel_executor(engine: Engine) -> AbstractContextManager[ParallelExecutor]:
    """Rank 0's executor, while the others serve; leaving sees that they have ended well."""
    return executor_of(engine.config.build_config.tp_size, lambda ranks: load_executor(engine, CPU, ranks))


@contextmanager
def executor_of(size: int, load: Callable[[Ranks], Executor]) -> Iterator[ParallelExecutor]:
    """As `parallel_executor`, of executors that `load` makes."""
    store = HashStore()

    def connected(rank: int) -> tuple[Executor, Ranks]:
        control, ranks = connect(store, rank, size, CPU, local=True)
        return load(ranks), control

    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(lambda rank: serve(*connected(rank)), rank) for rank in range(1, size)]
        executor = ParallelExecutor(*connected(0), processes=None)
        try:
            yield executor
        finally:
            executor.close()
        for other in others:
            other.result(timeout=10)
