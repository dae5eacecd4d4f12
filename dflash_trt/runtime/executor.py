"""A verifier and the proposer whose draft tokens it verifies, as the speculative loop drives them."""

from __future__ import annotations

from typing import Protocol

from dflash_trt.runtime.proposer import Proposal, Proposer, Sequences
from dflash_trt.runtime.verifier import Step, Verified, Verifier


class Executor(Protocol):
    """Steps a target and a proposer, on one rank or on all of them."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    """The longest prompt chunk that one pass takes."""
    max_window: int
    """Tokens that a pass verifies of a sequence at most: its anchor and the draft tokens after it."""

    def verify(self, step: Step) -> Verified:
        """See `Verifier.verify`; the proposer learns of it."""

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Proposer.propose`."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of all caches from one slot to another."""


class RankExecutor:
    """The verifier and the proposer of one rank.

    Of several ranks, all must be given the same calls in the same order. Each returns the same, with one exception:
    where a step has edits or filters, only rank 0 needs them, and only its draft tokens are looked at.
    """

    def __init__(self, verifier: Verifier, proposer: Proposer) -> None:
        self.max_batch_size = verifier.max_batch_size
        self.max_seq_len = verifier.max_seq_len
        self.max_num_tokens = verifier.max_num_tokens
        self.max_window = proposer.max_draft_len + 1
        self.proposes_on_every_rank = proposer.on_every_rank
        self.verifier = verifier
        self.proposer = proposer

    def verify(self, step: Step) -> Verified:
        """See `Executor.verify`."""
        verified = self.verifier.verify(step)
        self.proposer.observe(step, verified)
        return verified

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Executor.propose`."""
        return self.proposer.propose(sequences, count)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Executor.move_slot`."""
        self.verifier.move_slot(source, destination, length)
        self.proposer.move_slot(source, destination, length)
