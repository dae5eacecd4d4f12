"""Tags at the end of a text that is still coming."""

from __future__ import annotations


def cut_tag_start(text: str, tag: str) -> int:
    """Where the beginning of the tag starts that ends the text; the text's length where none does."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return len(text) - length
    return len(text)
