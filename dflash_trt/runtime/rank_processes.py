"""The other ranks of an engine as processes of this one, which never outlive it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import IO

from dflash_trt.engine.processes import USER_ERROR
from dflash_trt.errors import UserError

HERE, LOADED = b"here\n", b"loaded\n"
"""What a rank writes to its stdout: it can meet the others; its weights are loaded and it will serve."""
_PATIENCE = 10.0
"""Seconds in which a process that was told to end, or whose end was seen, must be gone."""


class RanksEnded(RuntimeError):
    """A rank of an engine died, and the others were ended with it."""


class RankProcesses:
    """Ranks 1 to `size` - 1, as `python -m MODULE RANK ARGUMENTS` each.

    A rank ends when the pipe that is its stdin closes: with `close`, and whatever way this process ends. When one ends
    by itself, the others are ended too.

    Args:
        module: what they run; it takes its rank first, and says `HERE` and `LOADED`.
        arguments: the others that it takes.
        size: ranks, this process's among them.
        environment: of the processes.
    """

    def __init__(self, module: str, arguments: list[str], size: int, environment: Mapping[str, str]) -> None:
        self._size = size
        self._logs = tempfile.TemporaryDirectory(prefix="dflash-trt-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first_to_end: int | None = None
        self._closing = False
        self._on_end: Callable[[], object] = lambda: None
        self._watcher = Thread(target=self._watch, daemon=True)
        try:
            for rank in range(1, size):
                command = [sys.executable, "-m", module, str(rank), *arguments]
                self._processes.append(self._start(rank, command, environment))
        except BaseException:
            self.close()
            raise

    def wait_for(self, answer: bytes) -> None:
        """Return when all have given this answer.

        Raises:
            UserError: one has refused something.
            RanksEnded: one died.
        """
        for rank, process in enumerate(self._processes, start=1):
            if _pipe(process.stdout).readline() != answer:
                self._first_to_end = rank
                raise self.failure()

    def watch(self) -> None:
        """From now on end all when one ends."""
        self._watcher.start()

    def when_one_ends(self, call: Callable[[], object]) -> None:
        """Have it called, on another thread, when a rank has ended by itself; at once where one has."""
        self._on_end = call
        if self._first_to_end is not None:
            call()

    def failure(self) -> Exception:
        """What ended the first rank that ended, to be raised."""
        if self._first_to_end is None:
            self._watcher.join(_PATIENCE)
        rank = self._first_to_end
        if rank is None:
            return RanksEnded(f"one of {self._size} ranks does not answer")
        status = self._processes[rank - 1].wait(_PATIENCE)
        lines = self._log(rank).read_text(errors="replace").strip().splitlines() or ["without a message"]
        if status == USER_ERROR:
            return UserError(f"rank {rank}: {lines[-1]}")
        ended = f"ended with status {status}: {lines[-1]}"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else ended
        return RanksEnded(f"rank {rank} of {self._size} {how}")

    def close(self) -> None:
        """End them and wait until they are gone; may be called again."""
        self._closing = True
        for process in self._processes:
            _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher.is_alive():
            self._watcher.join()
        for process in self._processes:
            _pipe(process.stdout).close()
        self._logs.cleanup()

    def _start(self, rank: int, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is this process's to handle
            )

    def _watch(self) -> None:
        """Wait until a rank's stdout closes, which nothing but its end does, and end the others."""
        ranks = {_pipe(process.stdout).fileno(): rank for rank, process in enumerate(self._processes, start=1)}
        ended = wait(ranks)
        if not self._closing:
            self._first_to_end = min(ranks[pipe] for pipe in ended if isinstance(pipe, int))
            for process in self._processes:
                process.kill()
            self._on_end()

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
