"""From an engine directory to an executor that runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_trt.engine.bindings import Model, engine_bindings
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.plans import open_plans
from dflash_trt.engine.tensorrt_api import TensorRTName, load_tensorrt
from dflash_trt.engine.weights import load_rank
from dflash_trt.errors import UserError
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.plugins.installed_triton import require_triton
from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.proposer import ProposerName
from dflash_trt.runtime.rank_group import nccl_communicator
from dflash_trt.runtime.torch_executor import torch_executor

_OUT_OF_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc", "out of memory")
"""In messages of allocators: torch's on a CPU, C++'s, CUDA's where torch passes it on."""


def load_executor(
    engine: Engine, device: torch.device, ranks: Ranks = ALONE, proposer: ProposerName = "dflash"
) -> RankExecutor:
    """Load an engine, or a rank's part.

    Args:
        proposer: what proposes draft tokens.

    Raises:
        UserError: a file is damaged, there is no memory for weights or caches, TensorRT does not take the engine, or it
            or Triton is not installed.
    """
    _check_cache_size(engine, device)
    if engine.config.builder.tensorrt is None:
        return _load_torch(engine, device, ranks, proposer)
    return _load_tensorrt(engine, engine.config.builder.tensorrt, device, ranks, proposer)


def _load_torch(engine: Engine, device: torch.device, ranks: Ranks, proposer: ProposerName) -> RankExecutor:
    """On a CPU its weights stay mapped, held once."""
    build = engine.config.build_config
    with _room_for_weights(engine, device):
        pair = load_rank(engine.config, engine.path, ranks.rank, device)
    with _room_for_caches(engine, device):
        return torch_executor(
            pair,
            max_batch_size=build.max_batch_size,
            max_seq_len=build.max_seq_len,
            max_num_tokens=build.max_num_tokens,
            ranks=ranks,
            proposer=proposer,
        )


def _load_tensorrt(
    engine: Engine, name: TensorRTName, device: torch.device, ranks: Ranks, proposer: ProposerName
) -> RankExecutor:
    require_triton(f"running an engine of {name}")
    # Which import it, and the torch backend does without.
    from dflash_trt.runtime.tensorrt_engine import TensorRTEngine
    from dflash_trt.runtime.tensorrt_executor import tensorrt_executor

    tensorrt, plans, config = load_tensorrt(name), open_plans(engine, ranks.rank), engine.config
    communicator = None if ranks.size == 1 else nccl_communicator(ranks, device)

    def loaded(which: Model) -> TensorRTEngine:
        bindings = engine_bindings(config)[which]
        with plans.read(which) as plan:
            return TensorRTEngine(tensorrt, plan, str(plans.files[which]), bindings, device, communicator)

    with _room_for_weights(engine, device):
        target, drafter = loaded("target"), loaded("drafter")
        shared = {name: plans.shared.read(name).to(device) for name in plans.shared.names()}
    with _room_for_caches(engine, device):
        return tensorrt_executor(config, target, drafter, shared, ranks=ranks, proposer=proposer)


@contextmanager
def _room_for_weights(engine: Engine, device: torch.device) -> Iterator[None]:
    with _out_of_memory_is(f"{engine.path}: {device} has no memory for its weights; build with more --tp_size"):
        yield


@contextmanager
def _room_for_caches(engine: Engine, device: torch.device) -> Iterator[None]:
    with _out_of_memory_is(_no_room(engine, device)):
        yield


@contextmanager
def _out_of_memory_is(refusal: str) -> Iterator[None]:
    """Nothing but a failed allocation becomes this `UserError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(refusal) from None


def _check_cache_size(engine: Engine, device: torch.device) -> None:
    """Linux promises more memory than there is and ends the process that uses it."""
    if engine.config.cache_bytes > memory_of(device):
        raise UserError(_no_room(engine, device))


def _no_room(engine: Engine, device: torch.device) -> str:
    build = engine.config.build_config
    return (
        f"{engine.path}: its caches take {engine.config.cache_bytes} bytes, more than {device} can give; build with a "
        f"smaller --max_batch_size, now {build.max_batch_size}, or --max_seq_len, now {build.max_seq_len}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. On a CPU torch has no class for that, so its allocator's message tells."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    told = str(error)
    return isinstance(error, RuntimeError) and any(sign in told for sign in _OUT_OF_MEMORY)


def memory_of(device: torch.device) -> int:
    """Bytes that a device has, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def find_device(name: str | None, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Where one of `local_size` ranks on this machine runs: each on a GPU of its own, or all on the CPU.

    Args:
        name: None is CUDA, or the CPU where there is none.

    Raises:
        UserError: the device is not there, or there are fewer than ranks.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not known; give cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; give cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    there = torch.cuda.device_count()
    if (device.index or 0) >= there:
        raise UserError(f"device {name!r} is not there: this machine has {there} CUDA devices")
    if local_size == 1:
        return device
    if device.index is not None or local_size > there:
        raise UserError(
            f"device is {name!r} for {local_size} ranks on a machine with {there} CUDA devices; each rank takes one: "
            "give cuda where there are as many, or cpu"
        )
    return torch.device("cuda", local_rank)
