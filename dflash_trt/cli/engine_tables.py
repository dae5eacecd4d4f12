"""What goes in and out of a TensorRT engine, and what it takes of memory, as tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_trt.engine.memory import Memory

IO_COLUMNS = ("is", "name", "type", "shape", "meaning")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """One that folds what is too wide rather than cut it."""
    from rich.table import Column, Table

    made = Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left")
    for row in rows:
        made.add_row(*row)
    return made


def io_table(engine: str, bindings: Mapping[str, Any]) -> Table:
    """Every input and output of an engine.

    Args:
        bindings: what `inspection.engine.told_bindings` makes of them.
    """
    return table(f"{engine} engine; {profiles(bindings)}", IO_COLUMNS, io_rows(bindings))


def profiles(bindings: Mapping[str, Any]) -> str:
    """The profiles of an engine, with the range of each size."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{size} {least} to {most}" for size, (least, _, most) in profile.items())
        for name, profile in bindings["profiles"].items()
    )


def io_rows(bindings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Of `IO_COLUMNS`; layers of one kind are one row."""
    return [
        (kind, _joined(names), dtype, " x ".join(map(str, shape)), meaning)
        for kind in ("input", "output")
        for (dtype, shape, meaning), names in _alike(bindings[f"{kind}s"]).items()
    ]


def memory_table(memory: Memory, ranks: int) -> Table:
    """What each rank takes."""
    rows = [(name.replace("_", " "), f"{size / 1e6:.1f} MB") for name, size in asdict(memory).items()]
    rows.append(("total", f"{memory.total / 1e6:.1f} MB"))
    return table(f"memory{' of each rank' if ranks > 1 else ''}, TensorRT's own not counted", ("what", "size"), rows)


def _alike(bindings: Iterable[Mapping[str, Any]]) -> dict[tuple[str, tuple[Any, ...], str], list[str]]:
    """Names by what else a row says of them, with no layer's number: those are of one kind."""
    groups: dict[tuple[str, tuple[Any, ...], str], list[str]] = {}
    for binding in bindings:
        kind = (binding["dtype"], tuple(binding["shape"]), binding["meaning"])
        groups.setdefault(kind, []).append(binding["name"])
    return groups


def _joined(names: list[str]) -> str:
    """`target.0.keys` to `target.3.keys` as `target.{0..3}.keys`; others one after the other."""
    forms: dict[str, list[str]] = {}
    for name in names:
        number = _LAYER.search(name)
        forms.setdefault(_LAYER.sub("{}", name), []).append("" if number is None else number[0])
    return ", ".join(
        form.replace("{}", f"{{{numbers[0]}..{numbers[-1]}}}" if len(numbers) > 1 else numbers[0])
        for form, numbers in forms.items()
    )
