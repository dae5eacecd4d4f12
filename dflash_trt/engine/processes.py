"""Processes of this package that another one of it starts: they find it, and never outlive that one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread

USER_ERROR = 2
"""Exit status of one that has refused something; the last line of its stderr says what."""


def environment_of_children(threads: int) -> dict[str, str]:
    """This process's, in which they find this package and compute on so many threads unless the user has said."""
    package = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": package if path is None else f"{package}{os.pathsep}{path}",
    }


def end_with_parent() -> None:
    """From now on end this process when the pipe that is its stdin closes, which its parent's end does too."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
