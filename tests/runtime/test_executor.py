"""The contract of a proposer that keeps a cache of its own, as a draft model does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.verifier import Step, Verified
from dflash_trt.runtime.window import FixedWindow
from tests.runtime.simulated_executor import SimulatedExecutor, following
from tests.runtime.test_scheduler import expected_output, request, run


class CachingProposer:
    """Holds the tokens that it has seen verified, and proposes from those alone, every third time wrongly."""

    max_draft_len = 3
    on_every_rank = True

    def __init__(self, slots: int) -> None:
        self.cached: list[list[int]] = [[] for _ in range(slots)]
        self.caught_up = 0
        """Tokens that it had to be given again."""

    def observe(self, step: Step, verified: Verified) -> None:
        rows = (part.tolist() for part in (step.slots, step.kv_len, step.q_len, step.draft_len, step.tokens))
        accepted = verified.accepted.tolist()
        for row, (slot, start, length, drafts, tokens) in enumerate(zip(*rows, strict=True)):
            if start <= len(self.cached[slot]):
                kept = length - drafts + accepted[row]
                self.cached[slot][start:] = tokens[:kept]

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        rows, lengths = [], []
        seeds = sequences.sampling.seeds.tolist()
        for slot, length, tokens, seed in zip(
            sequences.slots.tolist(), sequences.kv_len.tolist(), sequences.tokens, seeds, strict=True
        ):
            self._catch_up(slot, tokens[:length])
            sequence = [*self.cached[slot], tokens[length]]
            assert sequence == list(tokens)
            for _ in range(count):
                sequence.append(following(sequence, seed) if len(sequence) % 3 else 0)
            rows.append(sequence[-count:])
            lengths.append(len(tokens) % (count + 1))
        return Proposal(torch.tensor(rows), torch.tensor(lengths))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.cached[destination] = self.cached[source][:length]

    def _catch_up(self, slot: int, tokens: Sequence[int]) -> None:
        known = self.cached[slot][: len(tokens)]
        assert known == list(tokens[: len(known)]), "what it was told is not what the sequence holds"
        self.caught_up += len(tokens) - len(known)
        self.cached[slot] = list(tokens)


prompts = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8)


@given(prompts, st.integers(1, 3), st.integers(2, 4), st.booleans())
def test_it_is_told_enough_to_follow_every_sequence(
    inputs: list[list[int]], slots: int, window: int, reuse_prefixes: bool
) -> None:
    """Through prompt chunks, rejected tokens, slots that move and prefix cache hits."""
    proposer = CachingProposer(slots)
    executor = RankExecutor(SimulatedExecutor(slots), proposer)
    scheduler = Scheduler(executor, FixedWindow(window), reuse_prefixes=reuse_prefixes)
    requests = [request(prompt, 7) for prompt in inputs]
    scheduler.add(requests)
    run(scheduler)
    assert [each.output for each in requests] == [expected_output(prompt, 7) for prompt in inputs]
    assert proposer.caught_up == 0


def test_it_catches_up_after_steps_without_speculation() -> None:
    """Its first proposal for a slot that it has lost comes from the sequence's tokens."""
    proposer = CachingProposer(1)
    scheduler = Scheduler(RankExecutor(SimulatedExecutor(1), proposer), FixedWindow(4))
    one = request([1, 2, 3], 12)
    scheduler.add([one])
    scheduler.step()
    proposer.cached[0] = []
    run(scheduler)
    assert one.output == expected_output([1, 2, 3], 12)
    assert proposer.caught_up > 0
