"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

directory = click.Path(file_okay=False, path_type=Path)
"""The type of options that name a directory."""

file = click.Path(dir_okay=False, path_type=Path)
"""The type of options that name a file."""

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

proposer = click.option(
    "--proposer",
    type=click.Choice(["dflash", "ngram"]),
    default="dflash",
    show_default=True,
    help="What proposes draft tokens: the engine's drafter, or ngram, prompt lookup. The output is the same.",
)


def json_object(context: click.Context, parameter: click.Parameter, value: str) -> dict[str, Any]:
    """A callback that makes an option's text the JSON object it must be."""
    try:
        content = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not JSON ({error})", context, parameter) from None
    if not isinstance(content, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object", context, parameter)
    return content


def token_biases(context: click.Context, parameter: click.Parameter, value: str) -> dict[int, float]:
    """A callback that makes an option's text numbers by token id."""
    content = json_object(context, parameter, value)
    for token, bias in content.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10) or type(bias) not in (int, float):
            raise click.BadParameter(f"{value!r} is not numbers by token id", context, parameter)
    return {int(token): bias for token, bias in content.items()}
