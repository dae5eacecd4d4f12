"""The choice by the plugin's kernels, each rank with its part of the logits, against the choice from whole rows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from dflash_trt.ops.ranks import Ranks
from dflash_trt.runtime.kernel_choice import choose_by_kernels
from dflash_trt.runtime.rank_group import connect
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose
from tests.runtime.rank_threads import CPU

ROWS = 5
GUESSES = [4, 2, 0, 4]
AGREEING = [4, 1, 0, 2]
FIRST = torch.tensor([7, 100, 3, 12])
SAMPLING = Sampling.of([SamplingParams(temperature=t, seed=9 + i) for i, t in enumerate((0, 0.7, 1.5, 0))], [()] * 4)
Result = TypeVar("Result")


def of_all_ranks(size: int, call: Callable[[Ranks], Result]) -> list[Result]:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        calls = [
            pool.submit(lambda rank: call(connect(store, rank, size, CPU, local=True)[1]), rank) for rank in range(size)
        ]
        return [each.result(timeout=60) for each in calls]


def parts(logits: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's, padded with logits that would win; the ranks after the last token have nothing else."""
    size = -(-logits.shape[-1] // ranks)
    padding = size * ranks - logits.shape[-1]
    return list(torch.nn.functional.pad(logits, (0, padding), value=1000.0).split(size, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "ranks"), [(97, 1), (97, 2), (97, 4), (9, 8), (9001, 2)])
def test_ranks_choose_what_whole_rows_do(vocab_size: int, ranks: int, dtype: torch.dtype) -> None:
    """Greedy and sampled, of guesses that agree to the end, for a while, and not at all; bfloat16 has equal logits."""
    logits = torch.randn(4, ROWS, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
    positions = FIRST[:, None] + torch.arange(ROWS)
    expected = choose(logits, positions, SAMPLING, torch.zeros(4, 0))
    tokens = torch.zeros_like(expected)
    tokens[:, 1:] = expected[:, :-1]
    for row, agreeing in enumerate(AGREEING):
        tokens[row, agreeing + 1 :] = (tokens[row, agreeing + 1 :] + 1) % vocab_size
    mine = parts(logits, ranks)

    def call(rank: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        return choose_by_kernels(rank, mine[rank.rank], vocab_size, SAMPLING, FIRST, tokens, torch.tensor(GUESSES))

    for chosen, accepted, following in of_all_ranks(ranks, call):
        assert torch.equal(chosen.long(), expected)
        assert accepted.tolist() == AGREEING
        assert torch.equal(following.long(), expected[torch.arange(4), AGREEING])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_told_on_every_rank(value: float) -> None:
    logits = torch.zeros(4, ROWS, 97)
    logits[1, 2, 90] = value
    mine, zeros = parts(logits, 2), torch.zeros(4, ROWS, dtype=torch.int64)

    def call(rank: Ranks) -> Tensor:
        return choose_by_kernels(rank, mine[rank.rank], 97, SAMPLING, FIRST, zeros, zeros[:, 0])[0]

    for chosen in of_all_ranks(2, call):
        assert (chosen < 0).nonzero().tolist() == [[1, 2]]
