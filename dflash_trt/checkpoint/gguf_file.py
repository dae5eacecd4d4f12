"""Reading GGUF: the metadata, and where each tensor lies.

`gguf.GGUFReader` makes a numpy object of every string of the vocabulary, which takes seconds; this reader
takes a fraction of one and needs little memory. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from dflash_trt.checkpoint.regular_file import check_file, is_file
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.errors import UserError, access

Scalar: TypeAlias = "bool | int | float | str"
Value: TypeAlias = "Scalar | list[Scalar]"

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_LONGEST_SHOWN = 200
_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored.

    Attributes:
        name: its GGUF name.
        type: how its elements are packed.
        shape: outermost dimension first, as in torch; the file has them the other way round.
        offset: first byte, from the start of the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        elements, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // elements * size


class GGUFFile:
    """An open GGUF file: `metadata` by key and `tensors` by GGUF name, both in the file's order.

    Raises:
        UserError: cannot be read, not a GGUF file of version 2 or 3, cut short, with tensors that lie on each other, or
            one part of several.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with access(self.path, "read"):
            check_file(self.path)
            with self.path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise UserError(f"{self.path}: not a GGUF file")
                # Copy-on-write: torch wants memory that it could write to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise UserError(f"{self.path}: header of the GGUF file is cut short or damaged ({error})") from None
        self._check_tensors()
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UserError(
                f"{self.path}: is one of {self.metadata['split.count']} parts (split.count); merge them first"
            )

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed elements of a tensor, mapped: [nbytes]."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.offset)

    def error(self, key: str, problem: str) -> UserError:
        """A refusal that names file, key and, where it has one, the value."""
        shown = repr(self.metadata.get(key))
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}..."
        return UserError(f"{self.path}: {key}{f' is {shown}:' if key in self.metadata else ''} {problem}")

    def _check_tensors(self) -> None:
        """Each lies in the file, and on no other's bytes."""
        position = 0
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.offset):
            end = tensor.offset + tensor.nbytes
            if end > len(self._map):
                raise UserError(
                    f"{self.path}: tensor {tensor.name} ends at byte {end} of a file of {len(self._map)}; "
                    "download it again"
                )
            if tensor.offset < position:
                raise UserError(
                    f"{self.path}: tensor {tensor.name} begins at byte {tensor.offset}, before another ends at "
                    f"{position}; download it again"
                )
            position = end

    def _read_header(self) -> None:
        self._position = 4
        version = self._integer("I")
        if version not in _VERSIONS:
            raise UserError(f"{self.path}: GGUF version {version} is not supported; supported are 2 and 3")
        tensor_count, key_count = self._integer("Q"), self._integer("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"{key} twice")
            self.metadata[key] = self._value(GGUFValueType(self._integer("I")))
        stored = [self._tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment {alignment}")
        start = -(-self._position // alignment) * alignment
        self.tensors = {name: GGUFTensor(name, kind, shape, start + offset) for name, kind, shape, offset in stored}
        if len(self.tensors) < len(stored):
            raise ValueError("a tensor twice")

    def _unpack(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + code, self._map, self._position)
        self._position += struct.calcsize("<" + code)
        return values

    def _integer(self, code: str) -> int:
        return int(self._unpack(code)[0])

    def _text(self) -> str:
        length = self._integer("Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._map):
            raise ValueError(f"a string of {length} bytes at byte {start}")
        return self._map[start : self._position].decode("utf-8")

    def _value(self, kind: GGUFValueType) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            scalar: Scalar = self._unpack(_FORMATS[kind])[0]
            return scalar
        element, count = GGUFValueType(self._integer("I")), self._integer("Q")
        if element == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        if element == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        return list(self._unpack(f"{count}{_FORMATS[element]}"))

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._text()
        count = self._integer("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {count} dimensions")
        dimensions = self._unpack(f"{count}Q")
        kind = GGMLQuantizationType(self._integer("I"))
        if 0 in dimensions or (dimensions[0] if dimensions else 1) % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"tensor {name} of type {kind.name} has the shape {list(reversed(dimensions))}")
        return name, kind, tuple(reversed(dimensions)), self._integer("Q")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a directory without `config.json`.

    Returns:
        None where the path means a directory that holds something else, or nothing.

    Raises:
        UserError: the directory holds several or cannot be read, or the path is another file.
    """
    if path.suffix == ".gguf":
        return path
    with access(path, "read"):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is a file, and no .gguf; give the directory of a checkpoint, or a GGUF file")
        if not path.exists() or is_file(path / CONFIG_FILE):
            return None
        found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(f"{path}: holds several GGUF files ({names}); name one of them")
    return found[0] if found else None
