"""Prompt lookup: draft tokens are what followed the latest occurrence of a sequence's last tokens in itself.

It needs no model and no device, and helps where outputs repeat their prompts: summaries, edits of code, extraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.verifier import Step, Verified

LONGEST, SHORTEST = 4, 2
"""Last tokens that are looked for, the longest match first. Single tokens recur without meaning anything."""


class NgramProposer:
    """Looks up each sequence's last tokens in the sequence itself.

    Args:
        max_draft_len: draft tokens of a sequence at most.
    """

    on_every_rank = False

    def __init__(self, max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        self._lookups: dict[int, _Lookup] = {}
        """By slot."""

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Proposer.propose`."""
        found = [
            self._lookup(slot, tokens).continuation(count)
            for slot, tokens in zip(sequences.slots.tolist(), sequences.tokens, strict=True)
        ]
        padded = [draft + [0] * (count - len(draft)) for draft in found]
        return Proposal(torch.tensor(padded), torch.tensor([len(draft) for draft in found]))

    def observe(self, step: Step, verified: Verified) -> None:
        """Nothing to learn: `Sequences` have all tokens."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Proposer.move_slot`."""
        if source in self._lookups:
            self._lookups[destination] = self._lookups[source]

    def _lookup(self, slot: int, tokens: Sequence[int]) -> _Lookup:
        """That of a slot, where it is still of the same growing sequence."""
        lookup = self._lookups.get(slot)
        if lookup is None or lookup.tokens is not tokens:
            lookup = self._lookups[slot] = _Lookup(tokens)
        return lookup


class _Lookup:
    """Where each n-gram of a sequence ended last; a token is indexed once, however long the sequence grows."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._ends: dict[tuple[int, ...], int] = {}
        """By n-gram, the index of the token after it; n-grams that nothing follows yet are not among them."""
        self._indexed = 0

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens after the latest match, which may reach into themselves; none without a match."""
        self._index()
        for length in range(min(LONGEST, len(self.tokens)), SHORTEST - 1, -1):
            end = self._ends.get(tuple(self.tokens[-length:]))
            if end is not None:
                period = self.tokens[end : end + count]
                return [period[index % len(period)] for index in range(count)]
        return []

    def _index(self) -> None:
        for end in range(max(self._indexed, SHORTEST), len(self.tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(self.tokens[end - length : end])] = end
        self._indexed = len(self.tokens)
