"""Progress bars on stderr, shown in terminals only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def bytes_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes; yields what advances it."""
    with _bar(what, total, DownloadColumn()) as advance:
        yield advance


@contextmanager
def count_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` things; yields what advances it."""
    with _bar(what, total, MofNCompleteColumn()) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, amount: ProgressColumn) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
