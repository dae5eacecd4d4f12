"""A part of a JSON schema that cannot be enforced."""

from __future__ import annotations

import re

Path = tuple[str | int, ...]


class UnsupportedSchema(ValueError):
    """Says what is wrong with one place of a schema.

    Args:
        path: keys and indexes from the schema's root.
        problem: one line that continues a sentence beginning with the place.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{shown(path).lstrip('.') or 'the schema'}: {problem}")
        self.path = path
        self.problem = problem


def shown(path: Path) -> str:
    """As it is appended to a field's name: `.properties.a.items[0]`, `.properties["b c"]`."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" if re.fullmatch(r"[\w$-]+", part) else f"[{part!r}]"
        for part in path
    )
