"""Writing safetensors one tensor at a time, so that a checkpoint larger than memory can be converted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt.checkpoint.weights import DTYPES
from dflash_trt.errors import access

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """What will be written under one name."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file while holding one tensor at a time.

    The file appears under its name when it is complete; a failure leaves nothing behind.

    Args:
        path: the file to create or replace; its directory exists.
        specs: what is coming, in order; the header is written from it before the first tensor is asked for.
        tensors: the tensors, in the order of `specs`, on any device.
        metadata: texts to put in the header.

    Raises:
        ValueError: a duplicate name, a type that safetensors lacks, or tensors that differ from the specs.
        UserError: the system refuses to write.
    """
    path = Path(path)
    header, offsets = _layout(specs, metadata or {})
    partial = path.with_name(path.name + ".partial")
    try:
        with access(path, "written"), partial.open("wb") as file:
            file.write(header)
            for spec, tensor in zip(specs, tensors, strict=True):
                if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                    raise ValueError(f"{spec} was announced, {tensor.dtype} {tuple(tensor.shape)} came")
                file.seek(len(header) + offsets[spec.name])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _layout(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor starts after it.

    Widest types go first, so that every tensor lies on a multiple of its own item size: readers make views.
    """
    # transformers asks for this format.
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets: dict[str, int] = {}
    position = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.dtype not in _NAMES:
            raise ValueError(f"{spec.name}: safetensors has no {spec.dtype}")
        if spec.name in entries:
            raise ValueError(f"{spec.name}: is announced twice, or is a reserved name")
        offsets[spec.name] = position
        entries[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets
