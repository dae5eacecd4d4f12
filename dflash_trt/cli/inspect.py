"""`dflash-trt inspect`: what a checkpoint or an engine directory is."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dflash_trt.cli.options import output_format


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@output_format
def inspect(path: Path, output_format: str) -> None:
    """Say what PATH is: a target, a drafter (directories or a GGUF file), or an engine directory."""
    from rich.console import Console
    from rich.table import Column, Table

    from dflash_trt.engine.inspection import describe

    description = describe(path)
    if output_format == "json":
        click.echo(json.dumps(description))
        return
    columns = (Column(name, overflow="fold") for name in ("field", "value"))
    table = Table(*columns, title=f"{path}: {description['kind']}", title_justify="left")
    for name, value in description.items():
        if name != "kind":
            table.add_row(name, _shown(value))
    Console().print(table)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {inner}" for name, inner in value.items() if inner is not None)
    return str(value)
