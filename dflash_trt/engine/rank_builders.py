"""The processes that build the engines of ranks, some side by side, all gone when the build is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from dflash_trt.checkpoint.regular_file import check_file
from dflash_trt.engine.bindings import Model
from dflash_trt.engine.config import Backend
from dflash_trt.engine.directory import Engine, check_output_file
from dflash_trt.engine.processes import USER_ERROR, environment_of_children
from dflash_trt.errors import UserError

_MODULE = "dflash_trt.engine.rank_build"


class BuildFailed(RuntimeError):
    """The process that builds a rank ended, and not by refusing something."""


@dataclass(frozen=True)
class RankProgress:
    """How far the engine of a rank is."""

    rank: int
    engine: Model
    phase: str
    done: float
    """0 to 1."""


@dataclass(frozen=True)
class BuilderOptions:
    """What a user may ask of the builders, beside what the engines are."""

    on_progress: Callable[[RankProgress], None] = lambda progress: None
    """Called from several threads."""
    timing_input: Path | None = None
    """A timing cache to begin with."""
    timing_output: Path | None = None
    """Where that of rank 0 is written; the others measure the same."""

    def check(self, backend: Backend) -> None:
        """Refuse timing caches where nothing is timed, and one that could not be written once all is built.

        Raises:
            UserError: naming the option, or the file.
        """
        for option, file in (("input", self.timing_input), ("output", self.timing_output)):
            if file is not None and backend != "tensorrt":
                raise UserError(
                    f"{option}_timing_cache is {file}, backend is {backend}, which times no kernels when it builds; "
                    f"leave out --{option}_timing_cache, or give --backend tensorrt"
                )
        if self.timing_input is not None:
            check_file(self.timing_input)
        if self.timing_output is not None:
            check_output_file(self.timing_output)


class RankBuilders:
    """A process for each rank.

    Args:
        engine: the directory that they write to, whose config.json is there.
        parts: holds the weights of the ranks, as the torch backend has them.
    """

    def __init__(self, engine: Engine, parts: Path, options: BuilderOptions) -> None:
        self._paths = [str(engine.path), str(parts)]
        self._ranks = engine.config.build_config.tp_size
        self._options = options
        self._lock = Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, workers: int) -> None:
        """Run them all, so many at a time; when one fails, or the caller is interrupted, end the others.

        Raises:
            UserError: one has refused something, or there was not memory enough.
            BuildFailed: one ended in another way.
        """
        with ThreadPoolExecutor(workers) as pool:
            try:
                for done in as_completed([pool.submit(self._run, rank, workers) for rank in range(self._ranks)]):
                    done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stop()
                raise

    def _run(self, rank: int, workers: int) -> None:
        timing = (self._options.timing_input, self._options.timing_output if rank == 0 else None)
        command = [sys.executable, "-m", _MODULE, *self._paths, str(rank), *(str(file or "") for file in timing)]
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            with self._lock:
                if self._stopped:
                    raise CancelledError
                process = subprocess.Popen(
                    command,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment_of_children(threads),
                    start_new_session=True,  # Ctrl-C is this process's to handle
                )
                self._running.add(process)
            with process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._options.on_progress(RankProgress(rank, *json.loads(line)))
                status = process.wait()
            with self._lock:
                self._running.discard(process)
            log.seek(0)
            self._check(rank, status, log.read())

    def _check(self, rank: int, status: int, log: str) -> None:
        lines = log.strip().splitlines() or ["without a message"]
        where = f"rank {rank} of {self._ranks}: " if self._ranks > 1 else ""
        if self._stopped:
            raise CancelledError
        if status == USER_ERROR:
            raise UserError(f"{where}{lines[-1]}")
        if status == -signal.SIGKILL:
            raise UserError(
                f"{where}its build was ended by SIGKILL, which is what a system does that has no memory left; give "
                "fewer --workers, or a machine with more memory"
            )
        if status < 0:
            raise BuildFailed(f"{where}its build was ended by {signal.Signals(-status).name}: {lines[-1]}")
        if status > 0:
            raise BuildFailed(f"{where}its build ended with status {status}: {lines[-1]}")

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.kill()
