"""How the tensors of a model are divided among the ranks of tensor parallelism, every rule once.

Megatron's scheme (Shoeybi et al., 2019): a column-parallel layer divides its outputs, a row-parallel one its inputs,
and the sum over ranks of what the second gives is what one rank alone would compute. A model's `load` names the rule of
each tensor beside its shape; a build cuts by it, and a rank expects what was cut. Every rank's part has one shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch

OUT, IN = 0, 1
"""Axes of a weight [out, in]: what a column-parallel layer divides, and a row-parallel one."""


class Whole(Enum):
    """Rules of tensors that are not divided."""

    REPLICATED = "every rank holds it"
    ADDED_ONCE = "the first rank holds it, the others zeros: a term of a sum over ranks"


@dataclass(frozen=True)
class Split:
    """A tensor's axis, divided evenly in units that stay whole.

    Where ranks do not divide the units, `uneven` says what happens. "refuse": it cannot be. "repeat": each unit goes to
    as many ranks as there are to one, where units divide the ranks. "pad": the last ranks' parts are filled up, with
    numbers that change no result.
    """

    axis: int
    dimension: str
    """What the config calls it."""
    units: int
    """How many; heads for one. They divide the axis of every tensor that the rule is for, packed or not."""
    uneven: Literal["refuse", "repeat", "pad"] = "refuse"
    unit_size: int = 1
    """Of the dimension, how much one unit is."""
    filling: float = 0.0
    """What padding holds: 0, or 1 in the scales of NVFP4 blocks, where an encoder gives it to a block of zeros."""

    def permits(self, ranks: int) -> bool:
        """Whether this many ranks can have it."""
        repeats = self.uneven == "repeat" and ranks % self.units == 0
        return self.uneven == "pad" or self.units % ranks == 0 or repeats

    def share(self, ranks: int) -> int:
        """Units that each rank holds."""
        return -(-self.units // ranks)

    def first(self, rank: int, ranks: int) -> int:
        """The first unit of a rank; of padding alone it may be one past the last unit or more."""
        return rank * self.units // ranks if self.uneven == "repeat" else rank * self.share(ranks)

    def padded(self, ranks: int) -> int:
        """What the dimension is with its padding."""
        units = self.share(ranks) * ranks if self.uneven == "pad" else self.units
        return units * self.unit_size


Sharding = Split | Whole

REPLICATED, ADDED_ONCE = Whole.REPLICATED, Whole.ADDED_ONCE


def vocabulary(size: int) -> Split:
    """Rows of an embedding or a head. Whoever chooses a token drops the logits of padded rows."""
    return Split(OUT, "vocab_size", size, uneven="pad")


def kv_heads(count: int) -> Split:
    """Outputs of k and v. Ranks that outnumber heads repeat them, so that each has those of its query heads."""
    return Split(OUT, "num_key_value_heads", count, uneven="repeat")


def of_bias(weight: Sharding) -> Sharding:
    """The rule of a layer's bias [out]: it goes with the outputs of a column-parallel layer."""
    row_parallel = isinstance(weight, Split) and weight.axis == IN
    return ADDED_ONCE if row_parallel else weight


def local_shape(shape: tuple[int, ...], sharding: Sharding, ranks: int) -> tuple[int, ...]:
    """The shape of each rank's part of a tensor of `shape`."""
    if not isinstance(sharding, Split) or ranks == 1:
        return shape
    axis = sharding.axis
    return (*shape[:axis], sharding.share(ranks) * (shape[axis] // sharding.units), *shape[axis + 1 :])


def shard(tensor: torch.Tensor, sharding: Sharding, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of a tensor: a view of it, unless some of the part is padding."""
    if ranks == 1:
        return tensor
    if not isinstance(sharding, Split):
        return torch.zeros_like(tensor) if sharding is ADDED_ONCE and rank > 0 else tensor
    axis, extent = sharding.axis, tensor.shape[sharding.axis]
    shape = local_shape(tuple(tensor.shape), sharding, ranks)
    start = min(sharding.first(rank, ranks) * (extent // sharding.units), extent)
    held = tensor.narrow(axis, start, min(shape[axis], extent - start))
    if tuple(held.shape) == shape:
        return held
    padded = torch.full(shape, sharding.filling, dtype=tensor.dtype)
    padded.narrow(axis, 0, held.shape[axis]).copy_(held)
    return padded


def splits(shardings: Iterable[Sharding]) -> list[Split]:
    """Those that divide anything, each once."""
    return list(dict.fromkeys(rule for rule in shardings if isinstance(rule, Split)))
