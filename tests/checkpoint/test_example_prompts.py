from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint.example_prompts import EXAMPLE_PROMPTS_FILE, example_prompts_file, read_example_prompts
from dflash_trt.errors import UserError


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        ("One.\nTwo, é.\n", ["One.", "Two, é."]),
        ("\n  One.  \r\n\n", ["One."]),
        ("", []),
    ],
)
def test_prompts_are_lines(tmp_path: Path, content: str, prompts: list[str]) -> None:
    (tmp_path / EXAMPLE_PROMPTS_FILE).write_bytes(content.encode())
    assert read_example_prompts(tmp_path) == prompts
    assert example_prompts_file(tmp_path) == {EXAMPLE_PROMPTS_FILE: content.encode()}


def test_no_file_is_no_prompts(tmp_path: Path) -> None:
    assert read_example_prompts(tmp_path) == [] and example_prompts_file(tmp_path) == {}


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    (tmp_path / EXAMPLE_PROMPTS_FILE).write_bytes("Où?".encode("latin-1"))
    with pytest.raises(UserError, match=r"example_prompts.txt: is not UTF-8 \(byte 1\)"):
        read_example_prompts(tmp_path)
