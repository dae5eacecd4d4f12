"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


class JsonObject(click.ParamType):
    """The type of options that take a JSON object."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object, or a usage error."""
        try:
            content = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON ({error})", param, ctx)
        if not isinstance(content, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return content
