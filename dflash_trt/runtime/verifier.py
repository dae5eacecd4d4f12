"""What runs the target: the contract of a verifier, the step that it is given and what it makes of it.

A verifier owns weights and caches and knows nothing of requests; the scheduler and the speculative loop know requests
and nothing of tensors' whereabouts. All tensors of the contract are int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.sampling import IMPOSSIBLE, Sampling

NOT_FINITE = -1
"""What is chosen from logits that are not all finite: no token, so that no guess agrees with it."""

_DEAD_END = (
    "structured_outputs: no token can continue the output so far; "
    "the form has a branch that never ends, or is too ambiguous"
)


@dataclass(frozen=True)
class Verified:
    """What the target made of a step: how many guesses it agrees with, and the token that comes after those."""

    accepted: Tensor
    """[B] 0..draft_len"""
    next: Tensor
    """[B] the target's own choice after the accepted guesses; `NOT_FINITE` or `IMPOSSIBLE` where there is none."""
    logprobs: Sequence[Sequence[TokenLogprobs]] = ()
    """B of these, empty where they are not asked for: of the accepted guesses and of the token after them."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Why a row, by its index, has no next token: one line."""

    def with_errors(self, not_finite: str) -> Verified:
        """With that error wherever logits are not finite, and one that says so where no token may come next."""
        reasons = {NOT_FINITE: not_finite, IMPOSSIBLE: _DEAD_END}
        return replace(
            self, errors={row: reasons[token] for row, token in enumerate(self.next.tolist()) if token in reasons}
        )


@dataclass(frozen=True)
class Step:
    """One pass of the target over B sequences of up to T tokens.

    Of row i, the first `q_len[i]` tokens count; they stand at positions `kv_len[i]`.. of slot `slots[i]`, and the last
    `draft_len[i]` of them are guesses to be verified. A prompt chunk is a row with none.
    """

    tokens: Tensor
    """[B, T]"""
    q_len: Tensor
    """[B] 1..T"""
    draft_len: Tensor
    """[B] 0..q_len - 1"""
    kv_len: Tensor
    """[B] positions already in the slot's caches."""
    slots: Tensor
    """[B] distinct."""
    sampling: Sampling

    @property
    def logit_rows(self) -> Tensor:
        """[B, R] rows that a token is chosen for: the one before the guesses, and theirs.

        R is that of the row with the most guesses. Others repeat their last row, whose choice is then not looked at.
        """
        first = self.q_len - self.draft_len - 1
        steps = torch.arange(int(self.draft_len.max()) + 1)
        return torch.minimum(first[:, None] + steps, self.q_len[:, None] - 1)

    @property
    def chosen_positions(self) -> Tensor:
        """[B, R] positions that the tokens chosen there will have."""
        return self.kv_len[:, None] + self.logit_rows + 1

    @property
    def guesses(self) -> Tensor:
        """[B, R - 1] the guesses, as `logit_rows` has them."""
        return self.tokens.gather(1, self.logit_rows[:, 1:])

    def verified(self, chosen: Tensor) -> Verified:
        """How far the guesses agree with the tokens [B, R] that the target chose, `NOT_FINITE` among them."""
        guesses = self.guesses
        agrees = (guesses == chosen[:, :-1]) & (torch.arange(guesses.shape[1]) < self.draft_len[:, None])
        accepted = agrees.long().cumprod(1).sum(1)
        return Verified(accepted, chosen.gather(1, accepted[:, None])[:, 0])


class Verifier(Protocol):
    """Runs the target. Row b of a result belongs to row b of the step.

    A slot's caches hold `max_seq_len` positions and as many more as a step may verify. What a pass writes past a
    sequence's length (rejected draft tokens, rows beyond `q_len`) is overwritten before anything reads it.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    """The longest prompt chunk that one pass takes."""

    def verify(self, step: Step) -> Verified:
        """Run the target, write its caches and those that it writes for a proposer, and choose tokens."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of the target's caches from one slot to another."""
