"""`dflash-trt inspect`: what a checkpoint or an engine directory is, and whether it is what it says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.engine_tables import io_table, table
from dflash_trt.cli.options import output_format
from dflash_trt.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

_OWN_TABLES = ("kind", "formats", "problems", "ranks", "engines")
_PATIENCE = 2.0
"""Seconds that need no progress bar."""


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@output_format
def inspect(path: Path, output_format: str) -> None:
    """Say what PATH is, and exit with 2 where it is not what it says.

    PATH is any Hugging Face checkpoint in safetensors, a GGUF file, a directory that holds target/ and drafter/, or an
    engine directory. Of quantized checkpoints all scales are read, of none the weights. TensorRT's engines are read
    whole.
    """
    from dflash_trt.inspection.describe import describe

    with _late_progress("reading") as progress:
        description = describe(path, progress)
    if output_format == "json":
        click.echo(json.dumps(description))
    else:
        _print(path, description)
    _refuse(path, description["problems"])


def _refuse(path: Path, problems: list[str]) -> None:
    if len(problems) == 1:
        raise UserError(problems[0])
    for problem in problems:
        click.echo(f"dflash-trt: {problem}", err=True)
    if problems:
        raise UserError(f"{path}: is not what it says it is, in the {len(problems)} ways above")


@contextmanager
def _late_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears when the work turns out to take its time; told how much of how much is done."""
    from dflash_trt.cli.progress import count_progress

    start, shown = monotonic(), 0
    advance: Callable[[int], None] | None = None
    with ExitStack() as stack:

        def progress(done: int, total: int) -> None:
            nonlocal advance, shown
            if advance is None and monotonic() - start > _PATIENCE:
                advance = stack.enter_context(count_progress(what, total))
            if advance is not None:
                advance(done - shown)
                shown = done

        yield progress


def _print(path: Path, description: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    if description["kind"] == "pair":
        for part in ("target", "drafter"):
            _print(path / part, description[part])
        return
    fields = {name: value for name, value in description.items() if name not in _OWN_TABLES}
    title = f"{path}: {description['kind']}"
    if "excluded" in fields:
        fields["excluded"] = {pattern: _number(weights, "weight") for pattern, weights in fields["excluded"].items()}
    if "links" in fields:
        fields["links"] = {f"to {place}": _number(names, "file") for place, names in fields["links"].items()}
    console.print(table(title, ("field", "value"), [(name, _shown(name, value)) for name, value in fields.items()]))
    if "engines" in description:
        _print_engines(console, description)
        return
    formats = [(name, *(_shown(*item) for item in count.items())) for name, count in description["formats"].items()]
    console.print(table("", ("format", "modules", "parameters", "bytes", "bits per parameter"), formats))


def _print_engines(console: Console, description: dict[str, Any]) -> None:
    for name, bindings in description["engines"].items():
        console.print(io_table(name, bindings))
    rows = [
        (str(sizes["rank"]), *(f"{sizes[f'{what}_bytes'] / 1e6:.1f} MB" for what in ("target", "drafter", "shared")))
        for sizes in description["ranks"]
    ]
    console.print(table("files", ("rank", "target engine", "drafter engine", "shared weights"), rows))


def _shown(name: str, value: object) -> str:
    if value is None:
        return "unknown"
    if name.endswith("bits_per_parameter"):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {inner}" for key, inner in value.items() if inner is not None)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _number(names: list[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
