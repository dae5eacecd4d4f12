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
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from dflash_trt.errors import UserError

Scalar: TypeAlias = "bool | int | float | str"
Value: TypeAlias = "Scalar | list[Scalar]"

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
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
        UserError: not a GGUF file of version 2 or 3, cut short, or one part of several.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"{self.path}: no such file")
        with self.path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"{self.path}: not a GGUF file")
            # Copy-on-write: torch wants memory that it could write to.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{self.path}: header of the GGUF file is cut short or damaged ({error})"
            ) from None
        for tensor in self.tensors.values():
            if tensor.offset + tensor.nbytes > len(self._map):
                raise UserError(
                    f"{self.path}: tensor {tensor.name} ends at byte {tensor.offset + tensor.nbytes} of a file of "
                    f"{len(self._map)}; download it again"
                )
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
        shown = f" is {self.metadata[key]!r}:" if key in self.metadata else ""
        return UserError(f"{self.path}: {key}{shown} {problem}")

    def _read_header(self) -> None:
        self._position = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise UserError(
                f"{self.path}: GGUF version {version}; supported are {_VERSIONS[0]} and {_VERSIONS[1]}"
            )
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(cast(int, key_count)):
            key = self._text()
            self.metadata[key] = self._value(self._type())
        stored = [self._tensor() for _ in range(cast(int, tensor_count))]
        alignment = cast(int, self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-self._position // alignment) * alignment
        self.tensors = {
            name: GGUFTensor(name, kind, shape, start + offset) for name, kind, shape, offset in stored
        }

    def _scalar(self, code: str) -> Scalar:
        value: Scalar = struct.unpack_from("<" + code, self._map, self._position)[0]
        self._position += struct.calcsize("<" + code)
        return value

    def _text(self) -> str:
        length = cast(int, self._scalar("Q"))
        start, self._position = self._position, self._position + length
        if self._position > len(self._map):
            raise ValueError(f"a string of {length} bytes at byte {start}")
        return self._map[start : self._position].decode("utf-8")

    def _type(self) -> GGUFValueType:
        return GGUFValueType(self._scalar("I"))

    def _value(self, kind: GGUFValueType) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_FORMATS[kind])
        element, count = self._type(), cast(int, self._scalar("Q"))
        if element == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        if element == GGUFValueType.ARRAY:
            raise ValueError("an array of arrays")
        code = f"<{count}{_FORMATS[element]}"
        values = struct.unpack_from(code, self._map, self._position)
        self._position += struct.calcsize(code)
        return list(values)

    def _tensor(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._text()
        dimensions = [cast(int, self._scalar("Q")) for _ in range(cast(int, self._scalar("I")))]
        kind = GGMLQuantizationType(self._scalar("I"))
        return name, kind, tuple(reversed(dimensions)), cast(int, self._scalar("Q"))
