"""An executor without a model: its caches hold the tokens themselves, and what it chooses follows from what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.verifier import Step, Verified

VOCAB_SIZE = 1000
MASK = -1
"""What a drafted block leaves in the drafter's cache: no token of any sequence."""
NEVER_WRITTEN = -2


def following(tokens: list[int], seed: int) -> int:
    """The simulated target: a function of sequence and seed, so that whatever is lost or out of place shows."""
    value = 7 + seed
    for token in tokens:
        value = (value * 31 + token + 1) % VOCAB_SIZE
    return value


@dataclass(frozen=True)
class Pass:
    """One pass of the target."""

    slots: list[int]
    q_len: list[int]


@dataclass
class SimulatedExecutor:
    """Every third guess of its drafter is wrong.

    A pass writes whatever rows it has, padding and guesses too, as executors do, and what it reads it reads from the
    caches alone. It holds callers to what native TensorRT engines need: a decode is slots 0..n-1, a prefill one slot.
    """

    max_batch_size: int
    block_size: int = 4
    max_num_tokens: int = 4
    max_seq_len: int = 64
    passes: list[Pass] = field(default_factory=list)
    """For tests to read and clear."""

    def __post_init__(self) -> None:
        positions = self.max_seq_len + self.block_size
        self.target = [[NEVER_WRITTEN] * positions for _ in range(self.max_batch_size)]
        self.drafter = [[NEVER_WRITTEN] * positions for _ in range(self.max_batch_size)]

    def verify(self, step: Step) -> Verified:
        slots, starts, q_len, draft_len, tokens = (
            part.tolist() for part in (step.slots, step.kv_len, step.q_len, step.draft_len, step.tokens)
        )
        self.passes.append(Pass(slots, q_len))
        assert min(q_len) >= 1, "an empty row has no logits"
        assert len(slots) == 1 or slots == list(range(len(slots)))
        accepted, chosen = [], []
        seeds = step.sampling.seeds.tolist()
        for slot, start, length, drafts, row, seed in zip(slots, starts, q_len, draft_len, tokens, seeds, strict=True):
            for cache in (self.target[slot], self.drafter[slot]):
                _write(cache, start, row)
            held = self.target[slot][: start + length]
            first, right = len(held) - drafts, 0
            while right < drafts and held[first + right] == following(held[: first + right], seed):
                right += 1
            accepted.append(right)
            chosen.append(following(held[: first + right], seed))
        return Verified(torch.tensor(accepted), torch.tensor(chosen))

    @property
    def max_window(self) -> int:
        return self.block_size

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        assert sequences.slots.tolist() == list(range(len(sequences.slots)))
        rows = []
        given = (
            part.tolist() for part in (sequences.anchors, sequences.kv_len, sequences.slots, sequences.sampling.seeds)
        )
        for anchor, length, slot, seed in zip(*given, strict=True):
            sequence = [*self.drafter[slot][:length], anchor]
            assert sequence == list(sequences.tokens[slot]), "the proposer is given another sequence"
            assert sequence[:-1] == self.target[slot][:length], "the two caches differ"
            _write(self.drafter[slot], length, [MASK] * self.block_size)
            guesses = []
            for _ in range(self.block_size - 1):
                sequence.append(following(sequence, seed))
                guesses.append(sequence[-1] if len(sequence) % 3 else 0)
            rows.append(guesses)
        return Proposal(torch.tensor(rows)[:, :count], torch.full_like(sequences.slots, count))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        for caches in (self.target, self.drafter):
            caches[destination][:length] = caches[source][:length]


def _write(cache: list[int], start: int, tokens: list[int]) -> None:
    assert start + len(tokens) <= len(cache), "writes past the end, which TensorRT drops"
    assert NEVER_WRITTEN not in cache[:start], "reads what was never written"
    cache[start : start + len(tokens)] = tokens
