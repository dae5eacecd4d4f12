"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

directory = click.Path(file_okay=False, path_type=Path)
"""The type of options that name a directory."""

output_format = click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to print on stdout.",
)

device = click.option(
    "--device", help="Where a torch engine runs: cpu, cuda or cuda:N.  [default: the first GPU, else the CPU]"
)
