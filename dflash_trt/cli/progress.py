"""Progress bars on stderr, shown in terminals only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from dflash_trt.engine.rank_builders import RankProgress
    from dflash_trt.runtime.llm import LLM


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


def measure_passes(llm: LLM) -> None:
    """Measure what passes take here, which a window that adapts needs to know, unless that is remembered."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring passes on this machine, once", total=None, visible=False)
        llm.pass_costs(lambda done, total: progress.update(task, completed=done, total=total, visible=True))


@contextmanager
def build_progress(weight_bytes: int) -> Iterator[tuple[Callable[[int], None], Callable[[RankProgress], None]]]:
    """A bar for the weights and one for each rank whose engines are built; yields what advances them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    ranks: dict[int, TaskID] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        weights = progress.add_task("writing weights", total=weight_bytes)

        def on_progress(told: RankProgress) -> None:
            if told.rank not in ranks:
                ranks[told.rank] = progress.add_task("", total=1)
            description = f"rank {told.rank}, {told.engine}: {told.phase}"
            progress.update(ranks[told.rank], description=description, completed=told.done)

        yield lambda size: progress.advance(weights, size), on_progress


@contextmanager
def _bar(what: str, total: int, amount: ProgressColumn) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)
