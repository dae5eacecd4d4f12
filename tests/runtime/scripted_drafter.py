"""An executor whose guesses are as good as a test wants, over a real target."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import torch

from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.verifier import Step, Verified


class ScriptedDrafter:
    """Guesses from known outputs, each guess wrong with probability `error_rate`.

    It notes what `verify` writes where and guesses from that, so that a slot which is mixed up shows.
    """

    def __init__(
        self, executor: Executor, outputs: Sequence[Sequence[int]], vocab_size: int, error_rate: float
    ) -> None:
        self.max_batch_size = executor.max_batch_size
        self.max_seq_len = executor.max_seq_len
        self.max_num_tokens = executor.max_num_tokens
        self.max_window = executor.max_window
        self._executor = executor
        self._outputs = [list(output) for output in outputs]
        self._vocab_size = vocab_size
        self._error_rate = error_rate
        self._written: dict[int, dict[int, int]] = defaultdict(dict)
        self._random = random.Random(0)

    def verify(self, step: Step) -> Verified:
        for slot, start, tokens in zip(step.slots.tolist(), step.kv_len.tolist(), step.tokens.tolist(), strict=True):
            self._written[slot].update(enumerate(tokens, start))
        return self._executor.verify(step)

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        rows = zip(*(part.tolist() for part in (sequences.anchors, sequences.kv_len, sequences.slots)), strict=True)
        drafts = [self._guess([self._written[s][i] for i in range(n)] + [a]) for a, n, s in rows]
        return Proposal(torch.tensor(drafts)[:, :count], torch.full_like(sequences.slots, count))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        self._written[destination] = dict(self._written[source])
        self._executor.move_slot(source, destination, length)

    def _guess(self, prefix: list[int]) -> list[int]:
        known = next((o[len(prefix) :] for o in self._outputs if o[: len(prefix)] == prefix), [])
        guesses = (known + [0] * self.max_window)[: self.max_window - 1]
        return [
            self._random.randrange(self._vocab_size) if self._random.random() < self._error_rate else guess
            for guess in guesses
        ]
