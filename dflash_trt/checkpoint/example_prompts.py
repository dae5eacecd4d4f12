"""Prompts of the kind that a drafter was trained on, which its checkpoint may carry and the page at `/` offers."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.regular_file import is_file, read_file
from dflash_trt.errors import UserError

EXAMPLE_PROMPTS_FILE = "example_prompts.txt"
"""One prompt a line, in UTF-8."""
_LARGEST = 1 << 20


def example_prompts_file(checkpoint: Path) -> dict[str, bytes]:
    """The file by its name, to be copied along; empty where the checkpoint has none.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    path = checkpoint / EXAMPLE_PROMPTS_FILE
    if not is_file(path):
        return {}
    content = read_file(path, _LARGEST)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}); write one prompt a line in UTF-8") from None
    return {EXAMPLE_PROMPTS_FILE: content}


def read_example_prompts(directory: Path) -> list[str]:
    """The prompts of a checkpoint or an engine directory; none where it has no such file.

    Raises:
        UserError: as `example_prompts_file`.
    """
    content = example_prompts_file(directory).get(EXAMPLE_PROMPTS_FILE, b"").decode()
    return [line.strip() for line in content.splitlines() if line.strip()]
