"""Tokenizers out of GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.checkpoint.gguf_tokenizer import read_tokenizer
from dflash_trt.errors import UserError
from tests.checkpoint import tiny_gguf

TOKENS = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "12", "Ġ1", "ĠĠ", "<tool>"]
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [int(TokenType.CONTROL)] * 2
    + [int(TokenType.NORMAL)] * (len(TOKENS) - 3)
    + [int(TokenType.USER_DEFINED)],
    "tokenizer.ggml.merges": ["Ġ 1", "1 2", "Ġ Ġ"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def read(tmp_path: Path, **changes: Any) -> Tokenizer:
    return read_tokenizer(GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", changes=BYTE_LEVEL | changes)))


@pytest.fixture(scope="module")
def real(smollm2: GGUFFile) -> Tokenizer:
    return read_tokenizer(smollm2)


def test_ids_are_those_of_the_file(real: Tokenizer, smollm2: GGUFFile) -> None:
    tokens = smollm2.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert real.get_vocab() == {token: index for index, token in enumerate(tokens)}


# SmolLM2's vocabulary lacks bytes of control characters and of the planes above the basic one.
BASIC = st.characters(min_codepoint=0x20, max_codepoint=0xFFFF, exclude_categories=("Cs",))


@given(st.text(BASIC, max_size=100))
def test_text_survives(real: Tokenizer, text: str) -> None:
    assert real.decode(real.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_whole(real: Tokenizer) -> None:
    assert real.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ1", "2"]),
        ("smollm", ["a", "ĠĠ", "1", "2"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "12"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2"]),
    ],
)
def test_how_digits_after_spaces_are_cut(tmp_path: Path, pre: str, expected: list[str]) -> None:
    changes = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    assert read(tmp_path, **changes).encode("a  12").tokens == expected


def test_begin_token(tmp_path: Path) -> None:
    assert read(tmp_path).encode("a").tokens == ["a"]
    assert read(tmp_path, **{"tokenizer.ggml.add_bos_token": True}).encode("a").tokens == ["<s>", "a"]
    assert read(tmp_path, **{"tokenizer.ggml.pre": "llama-bpe"}).encode("a").tokens == ["<s>", "a"]


def test_added_tokens(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("a<tool></s>").ids
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool></s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama': only \"gpt2\""),
        ({"model": None}, "tokenizer.ggml.model only"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken': not supported; supported are gpt-2, smollm"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix is True: not supported"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is True: not supported"),
        ({"merges": None}, "tokenizer.ggml.merges is required"),
        ({"token_type": [1, 1]}, "must have one entry for each of"),
        ({"add_bos_token": True, "bos_token_id": None}, "tokenizer.ggml.bos_token_id is required"),
    ],
)
def test_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        read(tmp_path, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    assert str(refusal.value).startswith(f"{tmp_path / 'm.gguf'}: ") and message in str(refusal.value)
