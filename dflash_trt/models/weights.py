"""How models ask for their weights, and how those are checked on the way in.

A model's `load` names every tensor it reads with the shape it must have. The same `load` run with a `Manifest` checks
and lists them from the files' headers, so what a build copies and what a model uses cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from dflash_trt.checkpoint.weights import INDEX_DTYPES, Weights
from dflash_trt.errors import UserError
from dflash_trt.ops.base import Linear, Tensor

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_RECOMPUTED = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store what their config says anyway."""


class WeightLoader(Protocol):
    """What a model's `load` is given."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The floating-point tensor `name`, which must have `shape`."""

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The integer tensor `name`, which must have `shape`."""

    def ignore(self, name: str) -> None:
        """A tensor that a checkpoint may hold and this model has no use for."""


def load_linear(loader: WeightLoader, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Linear:
    """The layer of `name`.weight [out, in] and, where `bias`, `name`.bias [out]."""
    weight = loader.tensor(f"{name}.weight", (out_features, in_features))
    return Linear(weight, loader.tensor(f"{name}.bias", (out_features,)) if bias else None)


@dataclass(frozen=True)
class CheckpointLoader:
    """Reads from a checkpoint or an engine directory; `place` puts each tensor where it will be used."""

    weights: Weights
    place: Callable[[torch.Tensor], torch.Tensor]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightLoader.tensor`."""
        _check(self.weights, name, shape, _FLOATS)
        return self.place(self.weights.read(name))

    def integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightLoader.integers`."""
        _check(self.weights, name, shape, INDEX_DTYPES)
        return self.place(self.weights.read(name))

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""


@dataclass(frozen=True)
class Manifest:
    """Checks what a `load` asks of a checkpoint and lists it in its order; reads headers only."""

    weights: Weights
    floats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """See `WeightLoader.tensor`."""
        _check(self.weights, name, shape, _FLOATS)
        self.floats[name] = shape

    def integers(self, name: str, shape: tuple[int, ...]) -> None:
        """See `WeightLoader.integers`."""
        _check(self.weights, name, shape, INDEX_DTYPES)
        self.others[name] = shape

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""
        self.ignored.add(name)

    def refuse_unread(self) -> None:
        """Refuse a checkpoint with tensors that the model has no place for: it is not what its config describes.

        Raises:
            UserError: naming the first such tensor and its file.
        """
        known = self.floats.keys() | self.others.keys() | self.ignored
        unread = sorted(n for n in self.weights.names() if n not in known and not n.endswith(_RECOMPUTED))
        if unread:
            count = f", the first of {len(unread)} such" if len(unread) > 1 else ""
            raise UserError(
                f"{self.weights.file_of(unread[0])}: tensor {unread[0]} has no place in the model that the config "
                f"describes{count}"
            )


def _check(weights: Weights, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if name not in weights:
        raise UserError(f"{weights.path}: lacks the tensor {name}, of shape {list(shape)}")
    where = f"{weights.file_of(name)}: tensor {name}"
    if weights.shape(name) != shape:
        raise UserError(f"{where} has shape {list(weights.shape(name))}; the config makes it {list(shape)}")
    if weights.dtype(name) not in dtypes:
        allowed = ", ".join(_name(dtype) for dtype in dtypes[:-1]) + f" or {_name(dtypes[-1])}"
        raise UserError(f"{where} has type {_name(weights.dtype(name))}; it must be {allowed}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
