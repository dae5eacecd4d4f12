"""Converting a model's weights: one file of the source is mapped at a time, its tensors converted side by side."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dflash_trt.checkpoint.safetensors_writer import write_safetensors
from dflash_trt.checkpoint.weights import INDEX_FILE, SINGLE_FILE, SafetensorsWeights, Weights
from dflash_trt.conversion.calibration import Calibration
from dflash_trt.conversion.plan import ModelPlan
from dflash_trt.conversion.tensors import Scales, convert_tensor, specs
from dflash_trt.errors import access
from dflash_trt.quantization.amax import tensor_amax

Advance = Callable[[int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2
"""Tensors a worker that may be converted and not yet written: more would only fill memory."""


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint, the tensors in it, and their bytes."""

    file: Path
    names: tuple[str, ...]
    nbytes: int

    @property
    def output_name(self) -> str:
        """The file's name after conversion; a GGUF file becomes safetensors."""
        return self.file.name if self.file.suffix == ".safetensors" else SINGLE_FILE


def shards(weights: Weights) -> list[Shard]:
    """The files of a checkpoint in the order of their tensors."""
    names: dict[Path, list[str]] = {}
    for name in weights.names():
        names.setdefault(weights.file_of(name), []).append(name)
    return [Shard(file, tuple(found), sum(_bytes(weights, name) for name in found)) for file, found in names.items()]


@dataclass(frozen=True)
class Workers:
    """Threads that convert tensors side by side."""

    pool: ThreadPoolExecutor
    count: int


@contextmanager
def workers() -> Iterator[Workers]:
    """As many threads as torch would use for one operation, each running one operation at a time.

    Quantizing is many small steps over parts that stay in cache, so tensors side by side use cores better than the
    threads of a single step do.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:
            yield Workers(pool, count)
    finally:
        torch.set_num_threads(count)


def convert_shard(
    plan: ModelPlan,
    shard: Shard,
    calibration: Calibration | None,
    output: Path,
    workers: Workers,
    advance: Advance,
) -> None:
    """Write the converted tensors of one source file; the file appears under its name when it is complete.

    Raises:
        UserError: a tensor cannot be quantized, or the file cannot be written.
    """
    weights = _mapped(plan.weights, shard.file)
    scales = Scales(_shared_amaxes(plan, shard, weights, workers), calibration)

    def convert(name: str) -> dict[str, torch.Tensor]:
        return convert_tensor(plan, weights, name, scales)

    def tensors() -> Generator[torch.Tensor]:
        with closing(_ahead(workers, convert, shard.names)) as results:
            for name, converted in zip(shard.names, results, strict=True):
                yield from converted.values()
                advance(_bytes(plan.weights, name))

    announced = [spec for name in shard.names for spec in specs(plan, name)]
    with closing(tensors()) as converted:  # closed at once where writing fails: what is still waiting is not begun
        write_safetensors(output, announced, converted)


def write_index(plan: ModelPlan, directory: Path) -> None:
    """Write the index that says which tensor is in which file, where there are several."""
    parts = shards(plan.weights)
    if len(parts) == 1 and parts[0].output_name == SINGLE_FILE:
        return
    found = [(spec, shard.output_name) for shard in parts for name in shard.names for spec in specs(plan, name)]
    content = {
        "metadata": {"total_size": sum(spec.nbytes for spec, _ in found)},
        "weight_map": {spec.name: file for spec, file in sorted(found, key=lambda entry: entry[0].name)},
    }
    with access(directory / INDEX_FILE, "written"):
        (directory / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _shared_amaxes(plan: ModelPlan, shard: Shard, weights: Weights, workers: Workers) -> Mapping[str, torch.Tensor]:
    """Of every weight that shares a scale with one in this shard; a few may lie in a neighbouring file."""
    if plan.algo in (None, "FP8"):  # FP8 shares no scales of weights
        return {}
    here = {name.removesuffix(".weight") for name in shard.names}
    groups = {plan.fused_with(module) for module in plan.quantized if module in here}
    modules = sorted({module for group in groups if len(group) > 1 for module in group})

    def amax(module: str) -> torch.Tensor:
        name = f"{module}.weight"
        file = plan.weights.file_of(name)
        source = weights if module in here else _mapped(plan.weights, file)
        return tensor_amax(source.read(name), f"{file}: {name}")

    return dict(zip(modules, workers.pool.map(amax, modules), strict=True))


def _mapped(weights: Weights, file: Path) -> Weights:
    """One file of a checkpoint, opened anew: its pages leave this process with what is returned."""
    return SafetensorsWeights(file) if isinstance(weights, SafetensorsWeights) else weights


def _ahead(workers: Workers, function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result]:
    """`function` of every item, in order, computed a bounded number of items ahead."""
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(workers.pool.submit(function, item))
            if len(pending) > _AHEAD * workers.count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _bytes(weights: Weights, name: str) -> int:
    return weights.dtype(name).itemsize * torch.Size(weights.shape(name)).numel()
