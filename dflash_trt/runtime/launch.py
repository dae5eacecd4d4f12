"""From an engine directory to an executor, with as many processes as it has ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_trt.engine.compatibility import check_runs_here
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.plans import check_plans
from dflash_trt.engine.processes import environment_of_children
from dflash_trt.engine.weights import check_rank_files
from dflash_trt.errors import UserError
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.load import find_device, load_executor
from dflash_trt.runtime.parallel_executor import ParallelExecutor, serve
from dflash_trt.runtime.proposer import ProposerName
from dflash_trt.runtime.rank_group import World, connect, file_store, launched_world, share_of_cores, world_store
from dflash_trt.runtime.rank_processes import HERE, LOADED, RankProcesses

_RANK = "dflash_trt.runtime.rank"


def open_executor(engine: Engine, device: str | None, proposer: ProposerName) -> tuple[Executor, Callable[[], None]]:
    """Load an engine; of several ranks, start the others or join those that a launcher has started.

    In a process that a launcher has started as another rank than the first, this serves until that is done, and exits.

    Returns:
        The executor of rank 0, and what ends the other ranks.

    Raises:
        UserError: the device is not there, a weight file is missing, damaged or of another build, there is no memory
            for the caches, or a launcher has started another number of processes than there are ranks.
        RanksEnded: a rank died.
    """
    size, world = engine.config.build_config.tp_size, launched_world()
    if world is not None and world.size != size:
        raise UserError(
            f"{engine.path}: tp_size is {size}, {world.size_variable} is {world.size}; start {size} processes, or one "
            "without a launcher, or build with that --tp_size"
        )
    _check_files(engine, device)
    if size == 1:
        return load_executor(engine, find_device(device), proposer=proposer), lambda: None
    executor = _start_ranks(engine, device, proposer) if world is None else _join(engine, device, world, proposer)
    return executor, executor.close


def _check_files(engine: Engine, device: str | None) -> None:
    """Before any rank is started."""
    builder = engine.config.builder
    if builder.tensorrt is None:
        check_rank_files(engine)
        return
    check_plans(engine)
    check_runs_here(engine, find_device(device))
    if find_device(device).type != "cuda":
        raise UserError(f"{engine.path}: is an engine of {builder.backend}, device {device!r} must be cuda or cuda:N")


def _start_ranks(engine: Engine, device: str | None, proposer: ProposerName) -> ParallelExecutor:
    size = engine.config.build_config.tp_size
    where, threads = find_device(device, 0, size), share_of_cores(size)
    _limit_threads(threads)
    with tempfile.TemporaryDirectory(prefix="dflash-trt-") as directory:
        store = str(Path(directory) / "store")
        arguments = [str(engine.path.absolute()), device or "", store, proposer]
        processes = RankProcesses(_RANK, arguments, size, environment_of_children(threads))
        try:
            processes.wait_for(HERE)
            control, ranks = connect(file_store(store, size), 0, size, where, local=True)
            executor = load_executor(engine, where, ranks, proposer)
            processes.wait_for(LOADED)
            processes.watch()
        except BaseException:
            processes.close()
            raise
    return ParallelExecutor(executor, control, processes)


def _join(engine: Engine, device: str | None, world: World, proposer: ProposerName) -> ParallelExecutor:
    where = find_device(device, world.local_rank, world.local_size)
    _limit_threads(share_of_cores(world.local_size))
    control, ranks = connect(world_store(world), world.rank, world.size, where, local=False)
    executor = load_executor(engine, where, ranks, proposer)
    if world.rank > 0:
        serve(executor, control)
        sys.exit()
    return ParallelExecutor(executor, control, processes=None)


def _limit_threads(threads: int) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
