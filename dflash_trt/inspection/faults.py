"""What is wrong with one tensor of a checkpoint, and many of these told in few lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One tensor that is wrong.

    Attributes:
        kind: faults of one kind are told in one line.
        file: where the tensor is, or would be.
        tensor: its name.
        what: how it is wrong, to be read after the name.
    """

    kind: tuple[str, ...]
    file: Path
    tensor: str
    what: str


def told(faults: Iterable[Fault]) -> tuple[str, ...]:
    """One line for each kind of fault, with the first tensor that has it and how many there are."""
    by_kind: defaultdict[tuple[str, ...], list[Fault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    lines = []
    for first, *others in by_kind.values():
        count = f"; the first of {len(others) + 1} such" if others else ""
        lines.append(f"{first.file}: {first.tensor} {first.what}{count}")
    return tuple(lines)
