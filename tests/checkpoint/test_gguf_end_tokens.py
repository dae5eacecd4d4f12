"""Which tokens of a GGUF file end a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from dflash_trt.checkpoint.gguf_config import end_token_ids
from dflash_trt.checkpoint.gguf_file import GGUFFile
from tests.checkpoint import tiny_gguf

KINDS = {"control": TokenType.CONTROL, "user": TokenType.USER_DEFINED, "normal": TokenType.NORMAL}


def ends(tmp_path: Path, tokens: dict[str, str], **named: int) -> list[str]:
    """The texts of the tokens that end a generation, of tokens by kind."""
    changes: dict[str, Any] = {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [int(KINDS[kind]) for kind in tokens.values()],
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{role}_token_id": index for role, index in named.items()},
    }
    file = GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", changes=changes))
    return [list(tokens)[index] for index in end_token_ids(file)]


@pytest.mark.parametrize(
    "text",
    [
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend▁of▁sentence\uff5c>"),
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"),
        *("<EOT>", "< EOT >", "_<EOT>", "_< EOT >", "[EOT]", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ],
)
def test_by_text(tmp_path: Path, text: str) -> None:
    tokens = {"e": "control", "a": "normal"}
    assert ends(tmp_path, {**tokens, text: "control"}) == ["e", text]
    assert ends(tmp_path, {**tokens, text: "user"}) == ["e", text]
    assert ends(tmp_path, {**tokens, text: "normal"}) == ["e"], "words of the language end nothing"


@pytest.mark.parametrize("role", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_by_key(tmp_path: Path, role: str) -> None:
    assert ends(tmp_path, {"e": "control", "a": "normal", "b": "control"}, **{role: 2}) == ["e", "b"]


def test_each_once_and_the_named_first(tmp_path: Path) -> None:
    tokens = {"<|endoftext|>": "control", "<|im_start|>": "control", "<|im_end|>": "control"}
    assert ends(tmp_path, tokens, eos=2, eot=2) == ["<|im_end|>", "<|endoftext|>"]


def test_a_message_of_several_channels_does_not_end_a_generation(tmp_path: Path) -> None:
    tokens = dict.fromkeys(["e", "<|end|>", "<|return|>", "<|call|>"], "control")
    assert ends(tmp_path, tokens) == ["e", "<|return|>", "<|call|>"]
