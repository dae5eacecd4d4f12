"""Text as it streams."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dflash_trt.runtime.detokenizer import Detokenizer
from tests.conftest import TINY

TOKENIZER = AutoTokenizer.from_pretrained(TINY / "target")


def push_all(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    shown = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        shown.append(detokenizer.push(token))
        if detokenizer.stopped:
            return shown, detokenizer
    return [*shown, detokenizer.finish()], detokenizer


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_pieces_add_up_to_the_whole(text: str) -> None:
    pieces, detokenizer = push_all(text)
    whole = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True)
    assert "".join(pieces) == detokenizer.text == whole


@given(st.text("abc ", max_size=30), st.lists(st.text("abc ", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stops_before_the_first_stop_text(text: str, stop: list[str]) -> None:
    """Nothing of a stop text is ever shown, and nothing before it is lost."""
    whole = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False))
    pieces, detokenizer = push_all(text, tuple(stop))
    at = min((whole.find(one) for one in stop if one in whole), default=None)
    assert detokenizer.stopped == (at is not None)
    assert "".join(pieces) == detokenizer.text
    if at is None:
        assert detokenizer.text == whole
    else:
        assert not any(one in detokenizer.text for one in stop)
        assert whole.startswith(detokenizer.text)


def test_an_unfinished_character_is_held_back_then_shown_as_the_tokenizer_does() -> None:
    tokens = TOKENIZER.encode("é", add_special_tokens=False)
    if len(tokens) < 2:
        pytest.fail("this tokenizer has é as one token; take another character")
    detokenizer = Detokenizer(TOKENIZER, ())
    assert detokenizer.push(tokens[0]) == ""
    assert detokenizer.finish() == TOKENIZER.decode(tokens[:1])
