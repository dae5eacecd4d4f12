"""From an engine directory to an executor that runs it."""

from __future__ import annotations

import os

import torch

from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.weights import open_weights
from dflash_trt.errors import UserError
from dflash_trt.models import dflash
from dflash_trt.models.pair import Pair, load_target
from dflash_trt.models.rotary import rotary_table
from dflash_trt.models.weights import CheckpointLoader
from dflash_trt.ops.base import RotaryTable
from dflash_trt.runtime.torch_executor import TorchExecutor


def load_executor(engine: Engine, device: str | None) -> TorchExecutor:
    """Load an engine of the torch backend; on a CPU its weights stay mapped from their files, held once.

    Raises:
        UserError: the device is not there, a weight file is damaged, or there is no memory for the caches.
    """
    where = _device(device)
    build, target, drafter = (
        engine.config.build_config,
        engine.config.pretrained_config,
        engine.config.speculative_config,
    )
    positions = build.max_seq_len + drafter.block_size

    def table(rope: RopeConfig) -> RotaryTable:
        return rotary_table(rope, positions, getattr(torch, build.dtype), where)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(where)

    target_weights, drafter_weights = open_weights(engine)
    pair = Pair(
        target=target,
        drafter=drafter,
        target_weights=load_target(CheckpointLoader(target_weights, place), target),
        drafter_weights=dflash.load(CheckpointLoader(drafter_weights, place), drafter),
        target_rotary=table(target.rope),
        drafter_rotary=table(drafter.rope),
    )
    no_room = UserError(
        f"{engine.path}: its caches take {engine.config.cache_bytes} bytes, more than {where} can give; build with a "
        f"smaller --max_batch_size, now {build.max_batch_size}, or --max_seq_len, now {build.max_seq_len}"
    )
    # Linux promises more memory than there is and ends the process that uses it.
    if engine.config.cache_bytes > _memory(where):
        raise no_room
    try:
        return TorchExecutor(
            pair,
            max_batch_size=build.max_batch_size,
            max_seq_len=build.max_seq_len,
            max_num_tokens=build.max_num_tokens,
        )
    except (RuntimeError, MemoryError):  # of torch, OutOfMemoryError on a GPU and a plain RuntimeError on a CPU
        raise no_room from None


def _memory(device: torch.device) -> int:
    """Bytes that a device has, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not known; give cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported; give cpu, cuda or cuda:N")
    return device
