"""TensorRT's engines of a rank as files, known to be of one build and undamaged before TensorRT reads them."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.engine.bindings import Model
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.weights import BUILD_ID
from dflash_trt.errors import UserError, access
from dflash_trt.ops.base import Tensor

_CHUNK = 1 << 24


@dataclass(frozen=True)
class PlanRecord:
    """What the header of a rank's shared weights says of one of its plans."""

    size: int
    sha256: str


@dataclass(frozen=True)
class RankPlans:
    """The files of one rank, seen to be there, of this build and of their sizes."""

    shared: SafetensorsWeights
    """The weights that both engines are given as inputs, under the names of those."""
    files: Mapping[Model, Path]
    records: Mapping[Model, PlanRecord]

    def read(self, which: Model) -> mmap.mmap:
        """A plan, mapped.

        Raises:
            UserError: it is damaged.
        """
        file = self.files[which]
        with access(file, "read"), file.open("rb") as opened:
            plan = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        if _sha256(plan) != self.records[which].sha256:
            raise UserError(f"{file}: is damaged, its content is not what was built; build the engine again")
        return plan


class PlanFile:
    """A file that a plan is written into, piece by piece as TensorRT gives it.

    Raises:
        UserError: here and in `write`, the system refuses.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._size = 0
        self._digest = hashlib.sha256()
        with access(file, "written"):
            self._opened = file.open("wb")

    def __enter__(self) -> PlanFile:
        return self

    def __exit__(self, *failure: object) -> None:
        with access(self._file, "written"):
            self._opened.close()

    def write(self, piece: bytes) -> None:
        """Append a piece."""
        with access(self._file, "written"):
            self._opened.write(piece)
        self._digest.update(piece)
        self._size += len(piece)

    @property
    def record(self) -> PlanRecord:
        """Of what was written so far."""
        return PlanRecord(self._size, self._digest.hexdigest())


def write_shared(file: Path, tensors: Mapping[str, Tensor], records: Mapping[Model, PlanRecord], build_id: str) -> None:
    """Write the weights that a rank's engines share, and what its plans are."""
    metadata = {BUILD_ID: build_id}
    for which, record in records.items():
        metadata |= {f"{which}_bytes": str(record.size), f"{which}_sha256": record.sha256}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(file, specs, tensors.values(), metadata)


def open_plans(engine: Engine, rank: int) -> RankPlans:
    """A rank's files, none of them read but for a header.

    Raises:
        UserError: one is missing or of another build.
    """
    shared, *plans = engine.tensorrt_files(rank)
    _check_there(engine, shared)
    weights = SafetensorsWeights(shared)
    metadata = weights.metadata()
    found, expected = metadata.get(BUILD_ID), engine.config.build_id
    if found != expected:
        raise UserError(
            f"{shared}: is of another build: its {BUILD_ID} is {found}, {CONFIG_FILE} says {expected}; build the "
            "engine again"
        )
    files = dict(zip(get_args(Model), plans, strict=True))
    records = {which: PlanRecord(int(metadata[f"{which}_bytes"]), metadata[f"{which}_sha256"]) for which in files}
    for which, file in files.items():
        _check_there(engine, file)
        with access(file, "read"):
            size = file.stat().st_size
        if size != records[which].size:
            raise UserError(
                f"{file}: has {size} bytes, {shared} says {records[which].size}: it is damaged or of another build; "
                "build the engine again"
            )
    return RankPlans(weights, files, records)


def check_plans(engine: Engine) -> None:
    """Refuse an engine that lacks a file of a rank, or has one of another build.

    Raises:
        UserError: naming the file.
    """
    for rank in range(engine.config.build_config.tp_size):
        open_plans(engine, rank)


def _check_there(engine: Engine, file: Path) -> None:
    ranks = engine.config.build_config.tp_size
    if not is_file(file):
        raise UserError(f"{file}: is missing; the engine has {ranks} rank{'s'[: ranks > 1]}, see {CONFIG_FILE}")


def _sha256(content: Any) -> str:
    digest, view = hashlib.sha256(), memoryview(content)
    for start in range(0, len(view), _CHUNK):
        digest.update(view[start : start + _CHUNK])
    return digest.hexdigest()
