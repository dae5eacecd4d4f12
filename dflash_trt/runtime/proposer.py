"""What proposes draft tokens: the contract of a proposer, what it is given and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.verifier import Step, Verified

ProposerName = Literal["dflash", "ngram"]


@dataclass(frozen=True)
class Sequences:
    """B sequences to be continued; row b of every field belongs to the same one. Tensors are int64 on the CPU."""

    anchors: Tensor
    """[B] the last token of each, which is in no cache yet."""
    kv_len: Tensor
    """[B] tokens before the anchor, all of them in the slot's caches."""
    slots: Tensor
    """[B] distinct."""
    sampling: Sampling
    tokens: Sequence[Sequence[int]]
    """B times prompt and output so far, the anchor included. Only rank 0 has them; elsewhere each is empty."""


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for B sequences."""

    tokens: Tensor
    """[B, count] int64 on the CPU; what follows `draft_len` of them is not looked at."""
    draft_len: Tensor
    """[B] 0..count"""


class Proposer(Protocol):
    """Proposes draft tokens, and is told what the verifier made of every step, prompt chunks among them.

    A proposer may keep caches of its own. It learns from `observe` which tokens have been verified where, and from the
    lengths in `Sequences` which of them count; where a slot has tokens that it has not seen (a prefix cache hit, steps
    without speculation), it catches up from `Sequences.tokens`.
    """

    max_draft_len: int
    """Draft tokens of a sequence at most."""
    on_every_rank: bool
    """Every rank takes part in `propose`; otherwise rank 0 alone does."""

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """Up to `count` draft tokens, 1..`max_draft_len`, for what follows each sequence."""

    def observe(self, step: Step, verified: Verified) -> None:
        """Learn what the verifier made of a step, before anything else is asked."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of whatever it keeps for a slot to another."""
