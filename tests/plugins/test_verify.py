"""The verify kernels, interpreted, against their torch reference and against what the torch executor does."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins import verify as plugin
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose
from tests.closeness import last_places

CHUNK = 16


@dataclass(frozen=True)
class Case:
    """What one call of `verify` takes."""

    logits: Tensor
    temperature: Tensor
    seeds: Tensor
    first: Tensor
    tokens: Tensor
    draft_len: Tensor

    def choices(self) -> Tensor:
        """What the runtime chooses for every row."""
        pairs = zip(self.temperature.tolist(), self.seeds.tolist(), strict=True)
        params = [SamplingParams(temperature=heat, seed=seed) for heat, seed in pairs]
        positions = self.first[:, None].long() + torch.arange(self.tokens.shape[1])
        return choose(self.logits, positions, Sampling.of(params, [()] * len(params)), self.tokens[:, :0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Greedy and sampled rows of one to five tokens, ties and excluded tokens among the logits, guesses right and wrong."""
    batch, rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5]))
    vocabulary = draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    # Few levels, so that equal logits are the rule.
    levels = draw(st.sampled_from([1, 3, 1000]))
    logits = (
        torch.randint(0, levels, (batch, rows, vocabulary), generator=generator)
        / levels
        * draw(st.sampled_from([1, 9]))
    )
    excluded = torch.rand(logits.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    case = Case(
        logits=logits.masked_fill(excluded, float("-inf")).to(dtype),
        temperature=torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.0]), min_size=batch, max_size=batch))),
        seeds=torch.tensor(draw(st.lists(st.integers(0, 2**63 - 1), min_size=batch, max_size=batch))),
        first=torch.tensor(draw(st.lists(st.integers(1, 10**6), min_size=batch, max_size=batch)), dtype=torch.int32),
        tokens=torch.zeros(batch, rows, dtype=torch.int32),
        draft_len=torch.tensor(
            draw(st.lists(st.integers(0, rows - 1), min_size=batch, max_size=batch)), dtype=torch.int32
        ),
    )
    wrong = torch.rand(batch, rows, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))
    case.tokens[:, 1:] = torch.where(wrong, (case.choices() + 1) % vocabulary, case.choices())[:, :-1].int()
    return case


def accepted_by_executor(case: Case, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted guesses and next tokens, one sequence and one guess after the other."""
    accepted = []
    for tokens, choices, guesses in zip(case.tokens.tolist(), chosen.tolist(), case.draft_len.tolist(), strict=True):
        count = 0
        while count < guesses and tokens[count + 1] == choices[count]:
            count += 1
        accepted.append(count)
    index = torch.tensor(accepted)
    return index.int(), chosen.gather(1, index[:, None])[:, 0].int()


@settings(max_examples=50)
@given(cases())
def test_verify_is_what_the_torch_executor_does(case: Case) -> None:
    chosen, accepted, following = plugin.verify(
        case.logits, case.temperature, case.seeds, case.first, case.tokens, case.draft_len, chunk=CHUNK, interpret=True
    )
    assert chosen.equal(case.choices().int())
    expected = accepted_by_executor(case, chosen)
    assert accepted.equal(expected[0]) and following.equal(expected[1])


@settings(max_examples=40)
@given(cases(), st.integers(0, 80), st.integers(0, 2**20))
def test_kernels_are_their_references(case: Case, valid: int, offset: int) -> None:
    counts = torch.tensor([valid], dtype=torch.int32), torch.tensor([offset], dtype=torch.int32)
    arguments = case.logits, case.temperature, case.seeds, case.first, *counts
    scores, ids = plugin.verify_partial(*arguments, chunk=CHUNK, interpret=True)
    expected_scores, expected_ids = plugin.verify_partial_reference(*arguments, chunk=CHUNK)
    torch.testing.assert_close(scores, expected_scores, **last_places(32))
    assert ids.equal(expected_ids)
    combined = plugin.verify_combine(scores, ids, case.tokens, case.draft_len, interpret=True)
    for result, reference in zip(
        combined, plugin.verify_combine_reference(scores, ids, case.tokens, case.draft_len), strict=True
    ):
        assert result.equal(reference)


@settings(max_examples=30)
@given(cases(), st.sampled_from([2, 3, 4]), st.booleans())
def test_ranks_together_choose_what_one_chooses(case: Case, ranks: int, reverse: bool) -> None:
    """Each with its part of the vocabulary, the last with padding that would win; gathered in any order."""
    vocabulary = case.logits.shape[-1]
    share = -(-vocabulary // ranks)
    padded = torch.nn.functional.pad(case.logits, (0, share * ranks - vocabulary), value=1e4)
    parts = []
    for rank in range(ranks):
        offset = rank * share
        counts = (torch.tensor([x], dtype=torch.int32) for x in (min(max(vocabulary - offset, 0), share), offset))
        logits = padded[..., offset : offset + share].contiguous()
        parts.append(
            plugin.verify_partial(
                logits, case.temperature, case.seeds, case.first, *counts, chunk=CHUNK, interpret=True
            )
        )
    if reverse:
        parts.reverse()
    scores, ids = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    chosen, _, _ = plugin.verify_combine(scores, ids, case.tokens, case.draft_len, interpret=True)
    assert chosen.equal(case.choices().int())


def greedy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, _ = logits.shape
    zeros = torch.zeros(batch, dtype=torch.int32)
    tokens = torch.zeros(batch, rows, dtype=torch.int32)
    return plugin.verify(logits, zeros.float(), zeros.long(), zeros, tokens, zeros, chunk=CHUNK, interpret=True)


def test_the_lowest_of_equal_tokens_is_chosen_within_and_across_chunks() -> None:
    logits = torch.zeros(1, 1, 50)
    logits[..., [7, 9, 30, 49]] = 1.0
    assert greedy(logits)[0].item() == 7
    assert greedy(logits.fill_(float("-inf")))[0].item() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 20, 33])
def test_a_row_that_is_not_finite_chooses_no_token(value: float, column: int) -> None:
    logits = torch.zeros(1, 3, 34)
    logits[0, 1, column] = value
    assert greedy(logits)[0].tolist() == [[0, -1, 0]]


def test_rows_of_several_tiles_and_the_chunks_of_many_ranks() -> None:
    scores = torch.rand(2, 19, 150, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(150, dtype=torch.int32).expand(2, 19, 150).contiguous()
    choices = scores.argmax(-1).int()
    tokens = torch.nn.functional.pad(choices, (1, 0))[:, :-1].contiguous()
    for drafted in ([18, 17], [16, 15], [0, 1]):
        chosen, accepted, following = plugin.verify_combine(
            scores, ids, tokens, torch.tensor(drafted, dtype=torch.int32), interpret=True
        )
        assert chosen.equal(choices)
        assert accepted.tolist() == drafted
        assert following.tolist() == [choices[0, drafted[0]], choices[1, drafted[1]]]


def test_shapes_that_do_not_fit_are_refused() -> None:
    logits = torch.zeros(2, 3, 5)
    ints = torch.zeros(2, dtype=torch.int32)
    tokens = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(UserError, match=r"verify_combine: tokens has shape \(2, 2\), it must have \(2, 3\)"):
        plugin.verify(logits, ints.float(), ints.long(), ints, tokens, ints)
    with pytest.raises(UserError, match=r"verify_partial: seeds has shape \(1,\), it must have \(2,\)"):
        plugin.verify(logits, ints.float(), ints.long()[:1], ints, tokens, ints)
