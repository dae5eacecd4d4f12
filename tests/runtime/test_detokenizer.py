"""Text as it streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dflash_trt.runtime.detokenizer import Detokenizer
from tests.conftest import TINY

TOKENIZER = AutoTokenizer.from_pretrained(TINY / "target")


def push_all(tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    shown = []
    for token in tokens:
        shown.append(detokenizer.push(token))
        if detokenizer.stopped:
            return shown, detokenizer
    return [*shown, detokenizer.finish()], detokenizer


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_whole(text: str) -> None:
    pieces, detokenizer = push_all(TOKENIZER.encode(text, add_special_tokens=False))
    whole = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True)
    assert "".join(pieces) == detokenizer.text == whole


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_tokens_decode(tokens: list[int]) -> None:
    """Sampling meets bytes that are no characters; they show as the tokenizer shows them."""
    pieces, detokenizer = push_all(tokens)
    assert "".join(pieces) == detokenizer.text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text("abc ", max_size=30), st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stops_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    """As soon as the tokens so far hold a stop text, the output is what comes before it; else all of it."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    pieces, detokenizer = push_all(tokens, tuple(stop))
    expected, stopped = TOKENIZER.decode(tokens), False
    for count in range(len(tokens) + 1):
        so_far = TOKENIZER.decode(tokens[:count])
        found = [so_far.find(one) for one in stop if one in so_far]
        if found:
            expected, stopped = so_far[: min(found)], True
            break
    assert "".join(pieces) == detokenizer.text == expected
    assert detokenizer.stopped is stopped


def test_an_unfinished_character_is_held_back_then_shown_as_the_tokenizer_does() -> None:
    tokens = TOKENIZER.encode("é", add_special_tokens=False)
    if len(tokens) < 2:
        pytest.fail("this tokenizer has é as one token; take another character")
    detokenizer = Detokenizer(TOKENIZER, ())
    assert detokenizer.push(tokens[0]) == ""
    assert detokenizer.finish() == TOKENIZER.decode(tokens[:1])
