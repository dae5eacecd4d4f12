"""The models of a build: what their tensors become on each rank, and writing them, a file for each model of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.weights import Weights, finite_in
from dflash_trt.engine.config import EngineConfig
from dflash_trt.engine.directory import rank_files
from dflash_trt.engine.weights import BUILD_ID, check_packed
from dflash_trt.models.sharding import REPLICATED, Sharding, Split, shard, splits
from dflash_trt.models.weights import PACKED_DTYPES

Progress = Callable[[int], None]
"""Told the bytes of every tensor as it is written."""


@dataclass(frozen=True)
class Part:
    """One model of a build."""

    weights: Weights
    specs: list[TensorSpec]
    """What its tensors become on each rank."""
    shardings: dict[str, Sharding]

    def padding(self, ranks: int) -> dict[str, tuple[int, int]]:
        """Dimensions that padding makes larger, each with its size before and after."""
        sizes = {rule.dimension: (rule.padded(1), rule.padded(ranks)) for rule in splits(self.shardings.values())}
        return {dimension: (size, padded) for dimension, (size, padded) in sizes.items() if size != padded}

    def padding_bytes(self, ranks: int) -> int:
        """Bytes that all ranks together hold of padding."""
        total = 0
        for spec in self.specs:
            rule = self.shardings.get(spec.name)
            if isinstance(rule, Split):
                padded = rule.padded(ranks)
                total += ranks * spec.nbytes * (padded - rule.padded(1)) // padded
        return total


def write_parts(
    target: Part, drafter: Part, config: EngineConfig, directory: Path, workers: int, progress: Progress
) -> None:
    """Write every rank's weights into `directory`/target and `directory`/drafter, which are there.

    Args:
        workers: files that are written side by side, each with one tensor in memory.
        progress: called from the workers' threads where there are several.

    Raises:
        UserError: a tensor cannot be read, or is not finite or too large for the type.
    """
    jobs = [
        partial(_write_file, file, part, rank, config)
        for rank in range(config.build_config.tp_size)
        for file, part in zip(rank_files(directory, rank), (target, drafter), strict=True)
    ]
    _side_by_side(jobs, workers, progress)


def _write_file(file: Path, part: Part, rank: int, config: EngineConfig, progress: Progress) -> None:
    tensors = _converted(part, rank, config.build_config.tp_size, progress)
    write_safetensors(file, part.specs, tensors, {BUILD_ID: config.build_id})


def _side_by_side(jobs: Sequence[Callable[[Progress], None]], workers: int, progress: Progress) -> None:
    """Run them on threads; when one fails, or the caller is interrupted, the others stop at their next tensor."""
    if workers == 1:
        for job in jobs:
            job(progress)
        return
    stopped = threading.Event()

    def advance(size: int) -> None:
        if stopped.is_set():
            raise CancelledError
        progress(size)

    with ThreadPoolExecutor(workers) as pool:
        try:
            for done in as_completed([pool.submit(job, advance) for job in jobs]):
                done.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _converted(part: Part, rank: int, ranks: int, progress: Progress) -> Iterator[torch.Tensor]:
    for spec in part.specs:
        file = part.weights.file_of(spec.name)
        tensor = shard(part.weights.read(spec.name), part.shardings.get(spec.name, REPLICATED), rank, ranks)
        if spec.dtype in PACKED_DTYPES.values():
            check_packed(spec.name, tensor, file)
            yield tensor
        else:
            yield finite_in(tensor, spec.dtype, f"{file}: {spec.name}")
        progress(spec.nbytes)
