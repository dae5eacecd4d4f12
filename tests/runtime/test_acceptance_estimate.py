"""The running estimate of acceptance, against guesses whose probabilities are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.acceptance import Acceptance


def accepted(likely: list[float], guesses: int, random_: random.Random) -> int:
    """Guesses that are right before the first that is wrong."""
    right = 0
    while right < guesses and random_.random() < likely[right]:
        right += 1
    return right


def test_each_place_is_estimated_from_verifications_that_came_so_far() -> None:
    likely, random_ = [0.9, 0.5, 0.8, 0.2], random.Random(0)
    found, sums = Acceptance([0.5] * 4, weight=1, memory=16), [0.0] * 4
    for _ in range(20_000):
        found.observe(4, accepted(likely, 4, random_))
        sums = [total + each for total, each in zip(sums, found.likely, strict=True)]
    assert [total / 20_000 for total in sums] == pytest.approx(likely, abs=0.02)


def test_a_narrow_window_says_nothing_of_later_places() -> None:
    found = Acceptance([0.5, 0.25, 0.75], weight=1, memory=16)
    for _ in range(50):
        found.observe(1, 1)
    assert found.likely[1:] == [0.25, 0.75] and found.likely[0] > 0.9
    found.observe(0, 0)
    assert found.likely[1:] == [0.25, 0.75]


def test_it_follows_a_text_that_becomes_harder() -> None:
    found = Acceptance([0.9, 0.9], weight=1, memory=16)
    for _ in range(100):
        found.observe(2, 2)
    for _ in range(40):
        found.observe(2, 0)
    assert found.likely[0] < 0.1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15))
def test_expected_tokens_are_those_of_a_chain(likely: list[float]) -> None:
    tokens = Acceptance(likely, weight=1, memory=16).expected_tokens()
    assert len(tokens) == len(likely) + 1 and tokens[0] == 1
    chance = 1.0
    for before, after, each in zip(tokens, tokens[1:], likely, strict=False):
        chance *= each
        assert after - before == pytest.approx(chance)
