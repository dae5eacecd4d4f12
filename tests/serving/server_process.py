"""`dflash-trt serve` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

PROGRAM = "import sys; from dflash_trt.cli.main import main; sys.exit(main())"
ROOT = Path(__file__).parents[2]


class Process:
    """A server that has said that it serves."""

    def __init__(self, *arguments: object, program: str = PROGRAM, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *map(str, arguments), "--device", "cpu"],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("serving "):
                break
        self.name, _, self.url = self.lines[-1].removeprefix("serving ").partition(" at ")
        assert self.url, self.lines

    def end(self) -> tuple[int, list[str]]:
        """Its exit status, and what it said since it was ready."""
        _, rest = self.process.communicate(timeout=60)
        return self.process.returncode, rest.splitlines()


@contextmanager
def serving(*arguments: object, program: str = PROGRAM, **environment: str) -> Iterator[Process]:
    """`dflash-trt serve ARGUMENTS` during the block."""
    process = Process(*arguments, program=program, **environment)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()


def refused(url: str) -> bool:
    """New requests are told that the server shuts down, or find it gone."""
    try:
        return httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 503
    except httpx.TransportError:
        return True
