"""Choosing from logits, against transformers' own filters and penalties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_trt.errors import UserError
from dflash_trt.plugins.noise import gumbel
from dflash_trt.runtime.penalties import Penalties
from dflash_trt.runtime.row_edits import row_edits
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose, choose_in_part

NONE = torch.zeros((1, 0), dtype=torch.int64)


def drawn(logits: torch.Tensor, params: SamplingParams, draws: int = 400) -> set[int]:
    """The distinct tokens chosen from one row of logits, over many positions."""
    rows = logits.expand(1, draws, -1)
    sampling = Sampling.of([params], [()])
    return set(choose(rows, torch.arange(draws)[None], sampling, NONE)[0].tolist())


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([3, 50, 5000]),
    top_k=st.sampled_from([0, 1, 2, 7, 1500, 6000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01, 1e-50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
@settings(max_examples=150, deadline=None)
def test_filters_equal_transformers(
    seed: int, vocab_size: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """Same choices as the argmax over what transformers keeps, plus the noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    scores = logits / temperature
    ids: Any = None
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k > 0:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    positions = torch.tensor([[4, 9]])
    noise = gumbel(torch.tensor([[seed] * 2]), positions, vocab_size, torch.float64)
    expected = (scores + noise[0]).argmax(-1)
    actual = choose(logits[None], positions, Sampling.of([params], [()]), NONE)
    assert actual[0].tolist() == expected.tolist()


def test_tokens_that_tie_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    assert drawn(logits, SamplingParams(temperature=1.0, top_k=2, seed=0)) == {0, 1, 2, 3}
    flat = torch.zeros(2000, dtype=torch.float64)
    assert len(drawn(flat, SamplingParams(temperature=1.0, top_p=0.5, seed=0), draws=4000)) > 1500


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    logits = torch.randn(4, 3, 60, dtype=torch.float64)
    params = [
        SamplingParams(seed=1),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(temperature=0.5, top_k=3, seed=3),
        SamplingParams(temperature=2.0, top_p=0.4, min_p=0.1, seed=4),
    ]
    positions = torch.arange(12).view(4, 3)
    together = choose(logits, positions, Sampling.of(params, [()] * 4), NONE.expand(4, 0))
    for row, one in enumerate(params):
        alone = choose(logits[row : row + 1], positions[row : row + 1], Sampling.of([one], [()]), NONE)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(together[0], logits[0].argmax(-1))


def test_vanishing_temperature_is_greedy() -> None:
    logits = torch.randn(1, 50, 40, dtype=torch.float64)
    params = SamplingParams(temperature=1e-5, seed=1)
    assert torch.equal(choose(logits, torch.arange(50)[None], Sampling.of([params], [()]), NONE), logits.argmax(-1))


def test_repetition_penalty_equals_transformers() -> None:
    prompt, emitted = [3, 5, 5, 8], [8, 9]
    penalties = Penalties(SamplingParams(repetition_penalty=1.3), prompt, 20)
    for token in emitted:
        penalties.record(token)
    logits = torch.randn(1, 20, dtype=torch.float64)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + emitted]), logits)
    torch.testing.assert_close(penalties.apply(logits, NONE[0]), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    penalties = Penalties(params, [1, 2], 6)
    for token in (3, 3, 4):
        penalties.record(token)
    expected = torch.tensor([[0.0, 0.0, 0.0, -0.5 - 0.5, -0.5 - 0.25, 0.0]])
    torch.testing.assert_close(penalties.apply(torch.zeros(1, 6), NONE[0]), expected)


def test_rows_after_guesses_count_them() -> None:
    """Row r is penalized as if the first r guesses had been emitted."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    logits, guesses = torch.randn(4, 10, dtype=torch.float64), [7, 7, 2]
    penalties = Penalties(params, [1], 10)
    together = penalties.apply(logits, torch.tensor(guesses))
    for row in range(4):
        torch.testing.assert_close(penalties.apply(logits[row : row + 1], NONE[0])[0], together[row])
        if row < 3:
            penalties.record(guesses[row])


def test_nothing_asked_costs_nothing() -> None:
    assert row_edits(SamplingParams(temperature=1.0), [1, 2], 10, {0}, None) == ()


def test_each_output_has_a_seed_of_its_own() -> None:
    assert [one.seed for one in SamplingParams(n=3, seed=5).each()] == [5, 6, 7]
    assert [one.seed for one in SamplingParams(n=2, seed=2**63 - 1).each()] == [2**63 - 1, 0]
    drawn_seeds = {SamplingParams().each()[0].seed for _ in range(20)}
    assert len(drawn_seeds) == 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-9),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("n", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ("",)),
        ("stop", (1,)),
        ("stop_token_ids", ("a",)),
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("n", 1.5),
        ("n", 2**63),
        ("top_k", 10**20),
        ("temperature", None),
    ],
)
def test_refuses_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(UserError, match=name):
        replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]


def test_a_single_stop_text_is_not_its_characters() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]) == SamplingParams(stop=("a", "b"), stop_token_ids=(1,))


def test_a_flat_neighbour_changes_no_cut() -> None:
    """A row that needs the whole vocabulary sorted leaves the cuts of its neighbours alone."""
    logits = torch.randn(1, 200, 5000, dtype=torch.float64) * 2
    both = torch.cat((logits, torch.zeros(1, 200, 5000, dtype=torch.float64)))
    positions = torch.arange(200).expand(2, -1)
    for top_k, top_p in ((2000, 0.81), (1500, 0.99), (0, 0.5)):
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=1)
        flat = SamplingParams(temperature=1.0, top_p=0.9, seed=2)
        alone = choose(logits, positions[:1], Sampling.of([params], [()]), NONE)
        together = choose(both, positions, Sampling.of([params, flat], [()] * 2), NONE.expand(2, 0))
        assert torch.equal(together[0], alone[0])


def test_minus_one_keeps_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


@given(data=st.data(), size=st.integers(1, 30), part=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_best_of_all_parts_is_the_choice(data: st.DataObject, size: int, part: int) -> None:
    """Ties among them: the first of the largest wins, wherever the parts meet."""
    values = st.lists(st.integers(-2, 2), min_size=4 * size, max_size=4 * size)
    logits = torch.tensor(data.draw(values), dtype=torch.float64).reshape(2, 2, size)
    params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate(data.draw(st.permutations([0.0, 1.5])))]
    sampling, positions = Sampling.of(params, [(), ()]), torch.tensor([[4, 5], [9, 10]])
    assert not sampling.needs_rows
    parts = [
        choose_in_part(logits[..., first : first + part], positions, sampling, first) for first in range(0, size, part)
    ]
    scores, ids = (torch.stack(each) for each in zip(*parts, strict=True))
    best = ids.gather(0, scores.argmax(0, keepdim=True))[0]
    assert torch.equal(best, choose(logits, positions, sampling, NONE.expand(2, 0)))


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=3, top_p=0.5, min_p=0.5), False),  # greedy: the best passes every filter
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=1.0, top_k=3), True),
        (SamplingParams(temperature=1.0, top_p=0.5), True),
        (SamplingParams(temperature=1.0, min_p=0.5), True),
        (SamplingParams(presence_penalty=0.5), True),
    ],
)
def test_what_needs_whole_rows(params: SamplingParams, needed: bool) -> None:
    params = replace(params, seed=0)
    assert Sampling.of([params], [row_edits(params, [1], 5, {0}, None)]).needs_rows is needed


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e39), ("temperature", 101.0), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e39)],
)
def test_what_float32_cannot_hold_is_refused(name: str, value: float) -> None:
    """Masked logits would become NaN, which argmax prefers to every token that is allowed."""
    with pytest.raises(UserError, match=f"{name} is "):
        SamplingParams(**{name: value})
