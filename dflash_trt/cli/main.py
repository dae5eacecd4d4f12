"""The `dflash-trt` command: its subcommands, and how it fails."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from dataclasses import dataclass

import click

from dflash_trt import __version__
from dflash_trt.cli.build import build
from dflash_trt.cli.convert import convert
from dflash_trt.cli.demo import demo
from dflash_trt.cli.doctor import doctor
from dflash_trt.cli.inspect import inspect
from dflash_trt.cli.run import run
from dflash_trt.cli.serve import serve
from dflash_trt.engine.processes import wait_passively
from dflash_trt.errors import UserError


@dataclass
class Invocation:
    """What was given before the command."""

    debug: bool = False


@click.group(
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """DFlash speculative decoding: build an engine from a target and its drafter, check it, run it."""
    context.ensure_object(Invocation).debug = debug
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (build, convert, demo, doctor, inspect, run, serve):
    cli.add_command(command)


def main() -> None:
    """Run the command line; exit with 2 for a user's mistake, 1 for a failure of ours, each with one line."""
    invocation = Invocation()
    wait_passively(os.environ)  # before a command imports torch
    # A service manager's SIGTERM ends a build as Ctrl-C does: what was begun is removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        cli(standalone_mode=False, obj=invocation)
    except click.Abort:
        sys.exit(130)
    except (UserError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        _fail(2, message, invocation.debug)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = "" if error.filename is None else f"{error.filename}: "
            _fail(1, f"{where}{error.strerror}", invocation.debug)
        message = f"internal error, {type(error).__name__}: {error} (--debug before the command shows where)"
        _fail(1, message, invocation.debug)


def _fail(status: int, message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(f"dflash-trt: {' '.join(message.split())}", err=True)
    sys.exit(status)
