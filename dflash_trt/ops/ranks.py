"""The processes that run one model together, and what they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """One rank's view of its group. Alone, nothing is exchanged.

    What is gathered travels as bytes, so any type does on any backend, and sums are taken here, in the order of ranks:
    they are the same on every rank and in every run, which a backend's own sums need not be.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    """A `torch.distributed` process group of `size`; None where the rank is alone."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, all of one shape -> [ranks, *x.shape]."""
        if self.size == 1:
            return x[None]
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self.group._allgather_base(_bytes(gathered), _bytes(x.contiguous())).wait()
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in float32 or wider and rounded once."""
        if self.size == 1:
            return x
        terms = self.all_gather(x).to(torch.promote_types(x.dtype, torch.float32))
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, written into those of the others, which have its shape and type."""
        if self.size > 1:
            self.group.broadcast(x, 0).wait()
        return x


ALONE = Ranks()


def vocabulary_part(rank: int, size: int, vocab_size: int) -> tuple[int, int]:
    """The first token of a rank's part of `size` rows, and how many of these are tokens: the others are padding."""
    first = rank * size
    return first, max(0, min(size, vocab_size - first))


def is_disconnection(error: RuntimeError) -> bool:
    """Whether an exchange failed because another rank is gone; of gloo only the text tells."""
    return isinstance(error, torch.distributed.DistBackendError) or "/gloo/" in str(error)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
