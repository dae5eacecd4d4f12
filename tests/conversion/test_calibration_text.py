"""Calibration files of every kind, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.conversion.calibration_text import read_samples
from dflash_trt.errors import UserError
from tests.conftest import TINY

USER, ASSISTANT = {"role": "user", "content": "Copy: oak."}, {"role": "assistant", "content": "oak."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path: Path, tokenizer: PreTrainedTokenizerFast, size: int = 100, max_length: int = 1000) -> list[list[int]]:
    return read_samples(path, tokenizer, size, max_length)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [USER, ASSISTANT]}, "<|user|>Copy: oak.<|assistant|>oak.<|endoftext|>"),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Copy: oak."},
                    {"from": "gpt", "value": "oak."},
                ]
            },
            "<|system|>Be brief.<|user|>Copy: oak.<|assistant|>oak.<|endoftext|>",
        ),
        ({"prompt": "Copy: oak."}, "<|user|>Copy: oak.<|assistant|>"),
        ({"prompt": "Copy: oak.", "completion": "oak."}, "<|user|>Copy: oak.<|assistant|>oak.<|endoftext|>"),
        ({"prompt": "Copy: oak.", "response": "oak."}, "<|user|>Copy: oak.<|assistant|>oak.<|endoftext|>"),
        ({"prompt": "Copy: oak.", "response": None, "messages": None}, "<|user|>Copy: oak.<|assistant|>"),
        ({"text": "Copy: oak.\n\noak."}, "Copy: oak.\n\noak."),
        ({"text": "not this", "messages": [USER]}, "<|user|>Copy: oak."),
    ],
)
def test_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], text: str) -> None:
    (ids,) = read(write(tmp_path / "a.jsonl", row), tokenizer)
    assert ids == tokenizer.encode(text)


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"))),
    size=st.integers(1, 5),
    max_length=st.integers(1, 6),
    byte_order_mark=st.booleans(),
)
def test_rows_of_any_text_are_taken_in_order_and_cut(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    size: int,
    max_length: int,
    byte_order_mark: bool,
) -> None:
    path = write(tmp_path_factory.mktemp("texts") / "a.jsonl", *({"text": text} for text in texts), {"text": "oak"})
    if byte_order_mark:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    expected = [tokenizer.encode(text)[:max_length] for text in (*texts, "oak") if text.strip()][:size]
    assert read(path, tokenizer, size, max_length) == expected


@given(
    paragraphs=st.lists(st.lists(st.text(st.characters(codec="utf-8")).filter(str.strip), min_size=1), min_size=1),
    ending=st.sampled_from(["\n", "\r\n"]),
    blanks=st.integers(1, 3),
)
def test_paragraphs(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
    paragraphs: list[list[str]],
    ending: str,
    blanks: int,
) -> None:
    # What a line is, is for line endings to say.
    paragraphs = [[line.replace("\n", "-").replace("\r", "-").strip() or "-" for line in lines] for lines in paragraphs]
    texts = [ending.join(lines) for lines in paragraphs]
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    path.write_bytes((ending + (ending * (blanks + 1)).join(texts) + ending).encode())
    assert read(path, tokenizer) == [tokenizer.encode(text) for text in texts]


def test_what_is_empty_is_passed_over(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    empty = [{"text": " \n"}, {"prompt": ""}, {"messages": []}, {"conversations": []}, "", "  "]
    assert read(write(tmp_path / "a.jsonl", *empty, {"text": "oak"}), tokenizer, size=1) == [tokenizer.encode("oak")]


def test_reads_no_further_than_it_needs(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "oak"}, "{damaged")
    assert read(path, tokenizer, size=1) == [tokenizer.encode("oak")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{damaged", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object, not list"),
        ({"question": "a"}, "has none of the keys messages, conversations, prompt, text"),
        ({"text": None}, "has none of the keys"),
        ({"text": 5}, "text must be a string, not int"),
        ({"text": "a\udcff"}, "is no character"),
        ({"prompt": 5}, "a conversation needs messages"),
        ({"prompt": "a", "response": ["b"]}, "a conversation needs messages"),
        ({"messages": "a"}, "a conversation needs messages"),
        ({"messages": [{"role": "user"}]}, "a conversation needs messages"),
        ({"conversations": {"from": "human"}}, "conversations must be a list of objects"),
        ({"conversations": ["a"]}, "conversations must be a list of objects"),
        ({"conversations": [{"from": "tool", "value": "a"}]}, "from is 'tool'; it must be one of system, human"),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "it must be one of"),
        ({"conversations": [{"from": "human"}]}, "a conversation needs messages"),
    ],
)
def test_refuses_a_row_by_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: Any, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "oak"}, "", row)
    with pytest.raises(UserError, match=message) as refusal:
        read(path, tokenizer)
    assert str(refusal.value).startswith(f"{path}:3: ")


def test_refuses_chats_without_a_template(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"a\.jsonl:1: the model has no chat template"):
        read(write(tmp_path / "a.jsonl", {"messages": [USER]}), tokenizer)
    assert read(write(tmp_path / "a.jsonl", {"text": "oak"}), tokenizer) == [tokenizer.encode("oak")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl: holds no text"),
        ("a.txt", b"\n \n", "a.txt: holds no text"),
        ("a.txt", b"oak\n\n\xff\xfe\n", "a.txt:3: is not UTF-8"),
        ("a.parquet", b"PAR1", "a.parquet: texts are .jsonl"),
        ("a.txt", None, "a.txt: no such file"),
    ],
)
def test_refuses_a_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name, tokenizer)
