"""Processes of this package that another one of it starts: they find it, and never outlive that one."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from threading import Thread

USER_ERROR = 2
"""Exit status of one that has refused something; the last line of its stderr says what."""


_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""By which a user says how threads of OpenMP wait for each other."""


def wait_passively(environment: MutableMapping[str, str]) -> None:
    """Have the threads of an operation sleep while they wait, unless the user has chosen how they wait.

    By default they spin, which keeps the very thread that they wait for off its core when another program uses one.
    OpenMP reads this when torch is loaded, so it must be said before.
    """
    if not any(name in environment for name in _WAITING):
        environment["OMP_WAIT_POLICY"] = "passive"


def environment_of_children(threads: int) -> dict[str, str]:
    """This process's, in which they find this package, compute on so many threads and wait for each other asleep.

    What the user has said of threads and waiting stays.
    """
    package = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": package if path is None else f"{package}{os.pathsep}{path}",
    }
    wait_passively(environment)
    return environment


def end_with_parent() -> None:
    """From now on end this process when the pipe that is its stdin closes, which its parent's end does too."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
