"""How ranks find each other: those that this package started, and those that torchrun or MPI did."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count

import torch
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dflash_trt.errors import UserError
from dflash_trt.ops.ranks import Ranks

LOOPBACK = "127.0.0.1"
_MEETING = timedelta(minutes=5)
_FOREVER = timedelta(days=365)
"""Ranks wait for the next call however long it takes; the death of another closes a connection, which is noticed."""
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
"""What torchrun and Open MPI tell the processes that they start."""
_groups = count()


@dataclass(frozen=True)
class World:
    """The group of processes that a launcher made this one a part of."""

    rank: int
    size: int
    local_rank: int
    """Of the ranks on this machine."""
    local_size: int
    size_variable: str
    """What told the size."""


def launched_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """What a launcher says, torchrun or Open MPI; None where none has started this process.

    Raises:
        UserError: a variable is no number.
    """
    for names in _LAUNCHERS:
        if names[0] in environment and names[1] in environment:
            rank, size = (_number(environment, name) for name in names[:2])
            local_rank = _number(environment, names[2]) if names[2] in environment else rank
            local_size = _number(environment, names[3]) if names[3] in environment else size
            return World(rank, size, local_rank, local_size, names[1])
    return None


def world_store(world: World) -> Store:
    """Where the ranks of a launched world meet; a part of it that is this call's own.

    Raises:
        UserError: nothing says where.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"{world.size_variable} is {world.size}, and {' and '.join(missing)} must say where to meet; torchrun sets "
            f"both, of mpirun ask it: -x MASTER_ADDR={LOOPBACK} -x MASTER_PORT=29500"
        )
    return PrefixStore(f"dflash-trt/{next(_groups)}", _rendezvous(world.rank, world.size))


def file_store(path: str, size: int) -> Store:
    """Where ranks on one machine meet."""
    return FileStore(path, size)


def connect(store: Store, rank: int, size: int, device: torch.device, *, local: bool) -> tuple[Ranks, Ranks]:
    """Meet the other ranks; returns when all are there.

    Args:
        store: one that all have, and no other group.
        device: what this rank computes on.
        local: all are on this machine, and nobody outside it can connect.

    Returns:
        The ranks over their CPUs, for calls, and over their devices, for what layers exchange.
    """
    # The constructors: `init_process_group` makes one group a process, which is the caller's to have.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _MEETING
    options._devices = [
        ProcessGroupGloo.create_device(hostname=LOOPBACK) if local else ProcessGroupGloo.create_default_device()
    ]
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    gloo._set_default_timeout(_FOREVER)
    # A rank that went on and ended would close a connection on which another is still meeting it.
    store.set(f"met/{rank}", "")
    store.wait([f"met/{other}" for other in range(size)], _MEETING)
    control = Ranks(rank, size, gloo)
    if device.type == "cpu":
        return control, control
    torch.cuda.set_device(device)
    nccl = torch.distributed.ProcessGroupNCCL(
        PrefixStore("nccl", store), rank, size, torch.distributed.ProcessGroupNCCL.Options()
    )
    return control, Ranks(rank, size, nccl)


def nccl_communicator(ranks: Ranks, device: torch.device) -> int:
    """The address of the `ncclComm_t` that these ranks exchange by; all must ask for it together."""
    ranks.all_gather(torch.zeros(1, device=device))  # the first exchange makes it
    return int(ranks.group._comm_ptr())


def share_of_cores(ranks: int) -> int:
    """Threads for each of so many ranks on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


@cache
def _rendezvous(rank: int, size: int) -> Store:
    """One a process: rank 0 listens."""
    store: Store
    store, _, _ = next(rendezvous("env://", rank, size))
    return store


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name} is {environment[name]!r}, it must be a number") from None
