"""Weights on disk: opened by reading headers only, each tensor mapped when it is asked for."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.regular_file import check_file, is_file
from dflash_trt.errors import UserError, access

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LARGEST_INDEX = 128 << 20
_LARGEST_HEADER = 100_000_000
"""Bytes, by the format's definition."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
INDEX_DTYPES = (torch.int64, torch.int32)
"""Types of tensors that hold token ids."""


class Weights(Protocol):
    """Named tensors of a checkpoint, under their Hugging Face names.

    Attributes:
        path: the file or directory that was opened.
    """

    path: Path

    def names(self) -> tuple[str, ...]:
        """Every tensor, in the file's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype:
        """The type that `read` returns."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU. It may be a view of the file: do not write to it."""
        ...

    def file_of(self, name: str) -> Path: ...

    def __contains__(self, name: str) -> bool: ...


@dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def finite_in(tensor: torch.Tensor, dtype: torch.dtype, where: str) -> torch.Tensor:
    """A floating-point tensor in `dtype`, all of it finite.

    Args:
        tensor: as it was read.
        dtype: a floating-point type.
        where: file and name, for messages.

    Raises:
        UserError: it holds NaN or infinity, or a value that `dtype` makes infinite.
    """
    if not _is_finite(tensor):
        raise UserError(f"{where} holds NaN or infinity; the checkpoint is damaged")
    converted = tensor.to(dtype)
    if converted.dtype != tensor.dtype and not _is_finite(converted):
        narrow = str(dtype).removeprefix("torch.")
        wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
        raise UserError(f"{where} holds {tensor.abs().max().item():.3g}, beyond {narrow}; choose {wider}")
    return converted


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the extremes, NaN among them where there is one: `torch.isfinite` makes copies, of an embedding gigabytes."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


class SafetensorsWeights:
    """A safetensors checkpoint: one file, or a directory with one file or an index and its shards.

    In a directory, `model.safetensors.index.json` is used where there is one and decides which tensors exist;
    else `model.safetensors`; else the only other `*.safetensors`. Opening reads headers. `read` maps: the
    tensor shares the file's pages, copy-on-write, so a checkpoint larger than memory can be walked.

    Raises:
        UserError: no weights, a shard or tensor of the index is missing, or a file cannot be read, is cut short or
            is not safetensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[Path, Any] = {}
        with access(self.path, "read"):
            if self.path.is_dir() and is_file(self.path / INDEX_FILE):
                self._entries = _read_index(self.path / INDEX_FILE)
            else:
                self._entries = _read_header(_single_file(self.path))

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._entry(name).dtype

    def file_of(self, name: str) -> Path:
        return self._entry(name).file

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str) -> torch.Tensor:
        file = self.file_of(name)
        with access(file, "read"):
            if file not in self._files:
                self._files[file] = safe_open(file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor

    def metadata(self) -> dict[str, str]:
        """The texts in the header of the first file."""
        with access(self.path, "read"), safe_open(next(iter(self._entries.values())).file, framework="pt") as file:
            return dict(file.metadata() or {})

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UserError(f"{self.path}: has no tensor {name}")
        return self._entries[name]


def _single_file(path: Path) -> Path:
    if not path.is_dir():
        if not is_file(path):
            raise UserError(f"{path}: no such file or directory")
        return path
    if is_file(path / SINGLE_FILE):
        return path / SINGLE_FILE
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UserError(f"{path}: holds no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{path}: holds several weight files ({names}) and no {INDEX_FILE} to say which to use")
    return found[0]


def _read_index(path: Path) -> dict[str, _Entry]:
    weight_map = JsonObject.from_file(path, _LARGEST_INDEX).object("weight_map")
    shards: dict[str, dict[str, _Entry]] = {}
    entries = {}
    for name in weight_map.values:
        shard = weight_map.text(name)
        if Path(shard).name != shard:
            raise weight_map.error(name, "a shard must be a file name, in the directory of the index")
        if shard not in shards:
            if not is_file(path.parent / shard):
                raise UserError(f"{path}: names the shard {shard}, which is not in {path.parent}")
            shards[shard] = _read_header(path.parent / shard)
        if name not in shards[shard]:
            raise UserError(f"{path}: says that {name} is in {shard}, which does not hold it")
        entries[name] = shards[shard][name]
    if SINGLE_FILE not in shards and is_file(path.parent / SINGLE_FILE):
        raise UserError(f"{path.parent}: holds both {SINGLE_FILE} and {path.name} with other shards; remove one")
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    """Every tensor of one file, checked against the file's size, and by the library that will read them."""
    check_file(path)
    with access(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"{path}: not a safetensors file, or cut short: a header of {length} bytes, a file of {size}"
            )
        if length > _LARGEST_HEADER:
            raise _unreadable(path, f"it claims {length} bytes, the format's limit is {_LARGEST_HEADER}")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
        header.pop("__metadata__", None)
        described = sorted((_described(name, entry) for name, entry in header.items()), key=lambda item: item[3:])
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None

    entries = {}
    position = 0
    for name, dtype, shape, start, end in described:
        if dtype not in DTYPES:
            raise UserError(f"{path}: tensor {name} has type {dtype}; supported are {', '.join(DTYPES)}")
        count = math.prod(shape) * DTYPES[dtype].itemsize
        if start != position or end != start + count:
            raise UserError(
                f"{path}: tensor {name} claims bytes {start} to {end}, but {dtype} {list(shape)} takes "
                f"{count} from {position} on; download it again"
            )
        position = end
        entries[name] = _Entry(path, DTYPES[dtype], shape)
    if position != size - 8 - length:
        raise UserError(
            f"{path}: holds {size - 8 - length} bytes of tensors where its header describes {position}; "
            "download it again"
        )
    try:
        with access(path, "read"), safe_open(path, framework="pt"):
            return entries
    except SafetensorError as error:
        raise _unreadable(path, str(error)) from None


def _described(name: str, entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, type, shape, first byte and the byte after the last, as one entry of a header has them."""
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (_are_integers(shape) and _are_integers(offsets) and len(offsets) == 2):
        raise ValueError(f"tensor {name}: shape and data_offsets must be lists of integers")
    start, end = offsets
    if min((*shape, start, end)) < 0:
        raise ValueError(f"tensor {name}: a size is negative")
    return name, str(entry.get("dtype")), tuple(shape), start, end


def _are_integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int for number in value)


def _unreadable(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: is not a safetensors file: its header cannot be read ({reason})")
