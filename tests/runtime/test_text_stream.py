"""Outputs are spelled as the tokenizer spells them after their prompt."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.special_tokens import textless_token_ids
from dflash_trt.checkpoint.token_bytes import token_bytes
from dflash_trt.runtime.detokenizer import Detokenizer
from tests.tiny_tokenizers import LINES, MAKES

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOKENIZERS = {make: PreTrainedTokenizerFast(tokenizer_object=built(), **NAMES) for make, built in MAKES.items()}
BYTE = re.compile(r"<0x(..)>")
SPECIAL = {make: textless_token_ids(tokenizer) for make, tokenizer in TOKENIZERS.items()}


def streamed(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, (), prompt=prompt)
    pieces = [detokenizer.push(token) for token in output]
    text = "".join([*pieces, detokenizer.finish()])
    assert text == detokenizer.text
    return text


def whole(make: str, ids: list[int]) -> str:
    """By the library, tokens without text left out. Of a run of single bytes that is no UTF-8 the library replaces all:
    there, what is a character stays one."""
    tokenizer = TOKENIZERS[make].backend_tokenizer
    kept = [token for token in ids if token not in SPECIAL[make] and tokenizer.id_to_token(token) is not None]
    texts = [tokenizer.id_to_token(token) for token in kept]
    if make != "byte fallback":
        return str(tokenizer.decode(kept, skip_special_tokens=False))
    spelled, run = [], b""
    for text in [*texts, None]:
        if text is not None and (byte := BYTE.fullmatch(text)):
            run += bytes([int(byte[1], 16)])
            continue
        while run:
            size = next((n for n in range(1, 5) if is_character(run[:n])), 0)
            spelled.append(run[: size or 1].decode(errors="replace"))
            run = run[size or 1 :]
        spelled.append(text or "")
    return str(tokenizer.decoder.decode(spelled))


def is_character(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("make", MAKES)
@given(data=st.data())
@settings(max_examples=150)
def test_any_tokens_after_any_prompt(make: str, data: st.DataObject) -> None:
    size = len(TOKENIZERS[make])
    ids = st.lists(st.one_of(st.integers(0, size + 2), st.integers(3, min(size, 259))), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    before, after = whole(make, prompt), whole(make, prompt + output)
    text = streamed(TOKENIZERS[make], prompt, output)
    if after.startswith(before):
        assert text == after[len(before) :]
    else:  # the output goes on with the last character
        assert after.endswith(text) and len(text) >= len(after) - len(before)


@pytest.mark.parametrize("make", ["byte fallback", "metaspace", "word level", "word piece"])
def test_the_first_space_stays(make: str) -> None:
    tokenizer = TOKENIZERS[make]
    prompt, output = (tokenizer.encode(text, add_special_tokens=False) for text in ("The old map", "of Clara"))
    assert streamed(tokenizer, prompt, output) == " of Clara"
    assert streamed(tokenizer, [*prompt, tokenizer.convert_tokens_to_ids("<|im_start|>")], output) == " of Clara"
    assert streamed(tokenizer, [], output) == streamed(tokenizer, [tokenizer.bos_token_id], output) == "of Clara"


def test_a_character_that_the_prompt_begins() -> None:
    tokenizer = TOKENIZERS["byte level"]
    first, *rest = tokenizer.encode("\N{CRAB}", add_special_tokens=False)
    assert streamed(tokenizer, [first], rest) == "\N{CRAB}"
    assert streamed(tokenizer, [first], tokenizer.encode("a", add_special_tokens=False)) == "a"


@pytest.mark.parametrize("make", ["byte level", "byte fallback", "metaspace"])
def test_bytes_of_tokens_are_those_of_the_text(make: str) -> None:
    tokenizer, found = TOKENIZERS[make], token_bytes(TOKENIZERS[make])
    for text in (*LINES, "<note>12<tool_call>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(found[token] for token in ids).decode()
        assert spelled.removeprefix(" ") == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_invalid_bytes_without_end_take_no_longer() -> None:
    """What is kept of an output to go on with does not grow."""
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer, ("zzz",))
    first = tokenizer.encode("\N{CRAB}", add_special_tokens=False)[0]
    assert [detokenizer.push(first) for _ in range(1000)][1:] == ["\N{REPLACEMENT CHARACTER}"] * 999
