"""Ranks of an engine as threads of this process, which meet as processes do and start in no time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.distributed import HashStore

from dflash_trt.engine.directory import Engine
from dflash_trt.runtime.load import load_executor
from dflash_trt.runtime.parallel_executor import ParallelExecutor, serve
from dflash_trt.runtime.rank_group import connect
from dflash_trt.runtime.torch_executor import TorchExecutor

CPU = torch.device("cpu")


@contextmanager
def parallel_executor(engine: Engine) -> Iterator[ParallelExecutor]:
    """Rank 0's executor, while the others serve; leaving sees that they have ended well."""
    size, store = engine.config.build_config.tp_size, HashStore()

    def load(rank: int) -> tuple[TorchExecutor, object]:
        control, ranks = connect(store, rank, size, CPU, local=True)
        return load_executor(engine, CPU, ranks), control

    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(lambda rank: serve(*load(rank)), rank) for rank in range(1, size)]
        executor = ParallelExecutor(*load(0), processes=None)
        try:
            yield executor
        finally:
            executor.close()
        for other in others:
            other.result(timeout=10)
