"""The scheduler's bookkeeping, over an executor that only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import Sampling, SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.step import Step, Verified

VOCAB_SIZE = 1000


class Silent:
    """Detokenizes to nothing."""

    text, stopped = "", False

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def following(tokens: list[int]) -> int:
    """The simulated target: a function of the whole sequence, so that any token lost or out of place shows."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % VOCAB_SIZE
    return value


@dataclass
class Simulated:
    """An executor whose caches hold the tokens themselves; every third guess is wrong."""

    max_batch_size: int
    block_size: int
    max_num_tokens: int = 4
    max_seq_len: int = 64
    slots: dict[int, list[int]] = field(default_factory=dict)
    passes: int = 0

    def verify(self, step: Step) -> Verified:
        self.passes += 1
        accepted, chosen = [], []
        for slot, start, length, drafts, row in zip(
            *(t.tolist() for t in (step.slots, step.kv_len, step.q_len, step.draft_len, step.tokens)), strict=True
        ):
            assert slot < self.max_batch_size
            held = self.slots.get(slot, [])[:start]
            assert len(held) == start, "reads what was never written"
            held += row[:length]
            assert len(held) <= self.max_seq_len
            right = 0
            first = len(held) - drafts
            while right < drafts and held[first + right] == following(held[: first + right]):
                right += 1
            self.slots[slot] = held
            accepted.append(right)
            chosen.append(following(held[: first + right]))
        return Verified(torch.tensor(accepted), torch.tensor(chosen))

    def draft(self, anchors: Tensor, kv_len: Tensor, slots: Tensor, sampling: Sampling, count: int) -> Tensor:
        rows = []
        for anchor, length, slot in zip(anchors.tolist(), kv_len.tolist(), slots.tolist(), strict=True):
            sequence = [*self.slots[slot][:length], anchor]
            guesses = []
            for _ in range(self.block_size - 1):
                sequence.append(following(sequence))
                guesses.append(sequence[-1] if len(sequence) % 3 else 0)
            rows.append(guesses)
        return torch.tensor(rows)[:, :count]

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self.slots[destination] = self.slots[source][:length]


def request(prompt: list[int], max_tokens: int) -> Request:
    silent: Any = Silent()
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(prompt, params, limit=64, stop_token_ids={1, 2, 3, 4, 5}, detokenizer=silent, vocab_size=VOCAB_SIZE)


def expected_output(prompt: list[int], max_tokens: int) -> list[int]:
    output: list[int] = []
    while len(output) < min(max_tokens, 64 - len(prompt)):
        output.append(following(prompt + output))
        if output[-1] in {1, 2, 3, 4, 5}:
            break
    return output


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12), st.integers(1, 70)), max_size=12
)


@given(REQUESTS, st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_no_token_is_lost_doubled_or_misplaced(
    arrivals: list[tuple[list[int], int]], max_batch_size: int, window: int
) -> None:
    executor = Simulated(max_batch_size, block_size=4)
    scheduler = Scheduler(executor, window)
    requests = [request(prompt, max_tokens) for prompt, max_tokens in arrivals]
    half = len(requests) // 2
    scheduler.add(requests[:half])
    emitted: dict[int, list[int]] = {id(one): [] for one in requests}
    late = requests[half:]
    while late or not scheduler.idle:
        if late:
            scheduler.add([late.pop(0)])
        before = {id(one): len(one.output) for one in scheduler.running}
        for emission in scheduler.step():
            emitted[id(emission.request)].append(emission.token)
        assert len(scheduler.running) <= max_batch_size
        assert all(len(one.output) > before.get(id(one), 0) for one in scheduler.running), "a request starves"
    for one, (prompt, max_tokens) in zip(requests, arrivals, strict=True):
        assert one.output == emitted[id(one)] == expected_output(prompt, max_tokens)
        assert one.finish_reason is not None
    assert scheduler.target_passes == executor.passes


def test_first_come_first_served() -> None:
    scheduler = Scheduler(Simulated(2, block_size=4), window=4)
    requests = [request([i], 40) for i in range(10, 16)]
    scheduler.add(requests)
    order = []
    while not scheduler.idle:
        for emission in scheduler.step():
            if emission.request not in order:
                order.append(emission.request)
    assert order == requests


def test_emissions_tell_drafted_tokens() -> None:
    scheduler = Scheduler(Simulated(1, block_size=4), window=4)
    one = request([10], 20)
    scheduler.add([one])
    drafted = 0
    while not scheduler.idle:
        drafted += sum(emission.drafted for emission in scheduler.step())
    assert drafted == one.statistics.accepted_tokens > 0
    assert one.statistics.decoded_tokens == one.statistics.verifications + drafted
