"""What is added to logits, and when an output may end, against one row and one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.row_edits import LogitBias, MinTokens

SIZE = 12
TOKENS = st.integers(0, SIZE - 1)
GUESSES = st.lists(TOKENS, max_size=5)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def drawn_logits(data: st.DataObject, guesses: list[int]) -> torch.Tensor:
    """[R, V] for the last of guesses, some impossible."""
    rows = data.draw(st.integers(1, len(guesses) + 1))
    values = st.lists(st.integers(-9, 9) | st.just(float("-inf")), min_size=rows * SIZE, max_size=rows * SIZE)
    return torch.tensor(data.draw(values)).reshape(rows, SIZE).to(data.draw(DTYPES))


@given(st.data(), GUESSES, st.dictionaries(TOKENS, st.floats(-100, 100), min_size=1))
def test_a_bias_is_added_to_its_tokens_in_every_row(
    data: st.DataObject, guesses: list[int], bias: dict[int, float]
) -> None:
    logits = drawn_logits(data, guesses)
    before = logits.clone()
    edit = LogitBias(bias)
    edited = edit.apply(logits, torch.tensor(guesses))
    assert torch.equal(logits, before) and edited.dtype == logits.dtype
    for token in range(SIZE):
        added = torch.tensor(bias.get(token, 0.0), dtype=torch.float64).to(logits.dtype)
        assert torch.equal(edited[:, token], logits[:, token] + added)
    edit.record(3)
    assert torch.equal(edit.apply(logits, torch.tensor(guesses)), edited), "tokens change nothing"


@given(st.data(), st.lists(TOKENS, max_size=6), GUESSES, st.integers(0, 12), st.sets(TOKENS, min_size=1))
def test_no_end_before_the_least_length(
    data: st.DataObject, output: list[int], guesses: list[int], least: int, stops: set[int]
) -> None:
    """Row r comes after the output, and all guesses but those of the rows after it."""
    logits = drawn_logits(data, guesses)
    before = logits.clone()
    edit = MinTokens(least, stops)
    for token in output:
        edit.record(token)
    edited = edit.apply(logits, torch.tensor(guesses))
    assert torch.equal(logits, before)
    for row in range(len(logits)):
        length = len(output) + len(guesses) - (len(logits) - 1 - row)
        others = [token for token in range(SIZE) if token not in stops]
        assert torch.equal(edited[row, others], logits[row, others])
        if length < least and logits[row, others].isfinite().any():
            assert edited[row, list(stops)].isneginf().all()
        else:
            assert torch.equal(edited[row], logits[row]), "long enough, or nothing else may follow"


@pytest.mark.parametrize("output", range(4))
def test_the_row_that_reaches_the_least_length_may_end(output: int) -> None:
    edit = MinTokens(3, {1})
    for _ in range(output):
        edit.record(5)
    edited = edit.apply(torch.zeros(4, SIZE), torch.tensor([5, 5, 5]))
    assert edited[:, 1].isneginf().tolist() == [output + row < 3 for row in range(4)]
