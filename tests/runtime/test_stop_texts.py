"""Stop texts: special tokens in them, and outputs that must have a least length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash_trt.runtime.detokenizer import Detokenizer
from tests.tiny_tokenizers import byte_level

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")


def output(text: str, stop: list[str], min_tokens: int = 0) -> tuple[str, int | None]:
    """What is shown of an output, and after how many tokens it stopped."""
    detokenizer = Detokenizer(TOKENIZER, stop, min_tokens=min_tokens)
    for count, token in enumerate(TOKENIZER.encode(text, add_special_tokens=False), 1):
        detokenizer.push(token)
        if detokenizer.stopped:
            return detokenizer.text, count
    detokenizer.finish()
    return detokenizer.text, None


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("a b<|im_end|>c", "<|im_end|>", "a b"),
        ("a b<note>c", "<note>", "a b"),
        ("a b<tool_call>c", "<tool_call>", "a b"),
        ("a b<|im_end|>\nc", "<|im_end|>\n", "a b"),
        ("a b<|im_end|>c", "b<|im_end|>", "a "),
        ("a b<|im_end|><|im_start|>c", "<|im_end|><|im_start|>", "a b"),
        ("a b</s>c", "</s>", "a b"),
    ],
)
def test_special_tokens_stop(text: str, stop: str, shown: str) -> None:
    assert output(text, ["zz", stop])[0] == shown
    assert output(text, ["zz"])[1] is None


def test_a_special_token_that_is_spelled_out_stops_too() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["<|im_end|>"])
    for character in "a<|im_end|>":
        detokenizer.push(TOKENIZER.convert_tokens_to_ids(character))
    assert (detokenizer.text, detokenizer.stopped) == ("a", True)


@pytest.mark.parametrize("stop", ["|", "im_end", "<|", "|>c"])
def test_parts_of_special_tokens_do_not_stop(stop: str) -> None:
    assert output("a<|im_end|>c", [stop]) == ("ac", None)


def test_tokens_without_text_do_not_hide_a_stop_text() -> None:
    assert output("xa<|im_end|>by", ["ab"])[0] == "x"
    assert output("xa<|im_end|>by", ["ab", "b<|im_end|>c"])[0] == "x"


def test_tokens_without_text_are_not_kept_while_a_stop_text_may_begin() -> None:
    detokenizer = Detokenizer(TOKENIZER, ["ab", "x<|im_end|>y"])
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    detokenizer.push(TOKENIZER.convert_tokens_to_ids("a"))
    assert not any(detokenizer.push(end) for _ in range(2000))
    assert detokenizer.length == 1 and detokenizer.finish() == "a"


@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_nothing_stops_within_the_least_length(text: str, stop: list[str], least: int) -> None:
    """vLLM's rule: a stop text ends the output if it ends in the text of a later token, wherever it begins."""
    detokenizer = Detokenizer(TOKENIZER, stop, min_tokens=least)
    pushed = ""
    for count, character in enumerate(text, 1):
        detokenizer.push(TOKENIZER.convert_tokens_to_ids(character))
        pushed += character
        ending = [len(pushed) - len(one) for one in stop if pushed.endswith(one)]
        if count > least and ending:
            assert (detokenizer.stopped, detokenizer.text) == (True, pushed[: min(ending)])
            return
        assert not detokenizer.stopped
        assert pushed.startswith(detokenizer.text) and detokenizer.length == len(pushed)
    detokenizer.finish()
    assert detokenizer.text == text
