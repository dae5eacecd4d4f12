"""The `dflash-trt` command: its subcommands, and how it fails."""

from __future__ import annotations

import sys
import traceback

import click

from dflash_trt import __version__
from dflash_trt.cli.build import build
from dflash_trt.cli.demo import demo
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.run import run
from dflash_trt.errors import UserError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """DFlash speculative decoding: build an engine from a target and its drafter, check it, run it."""


for command in (build, demo, doctor, inspect, run):
    cli.add_command(command)


def main() -> None:
    """Run the command line; exit with 2 for a user's mistake, 1 for a failure of ours, each with one line."""
    try:
        cli(standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except (UserError, click.ClickException) as error:
        _fail(2, error.format_message() if isinstance(error, click.ClickException) else str(error))
    except Exception as error:
        _fail(1, f"internal error, {type(error).__name__}: {error} (--debug before the command shows where)")


def _fail(status: int, message: str) -> None:
    if "--debug" in sys.argv[1:]:
        traceback.print_exc()
    click.echo(f"dflash-trt: {' '.join(message.split())}", err=True)
    sys.exit(status)
