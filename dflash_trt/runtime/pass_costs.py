"""What a decode step takes on this machine, learned from those that were run, and remembered between starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.engine.directory import Engine

Cell = tuple[int, int]
"""Requests that decode, and tokens that the pass has of each."""
_SAMPLES = 128
"""The latest of a cell, of which the fastest quarter counts: what else a machine does makes steps slower, never faster,
and often many in a row."""
_ENOUGH = 3
"""Samples of which one or two that are far off do not matter: a GPU's first pass of a shape, and the one that captures
its graph."""
_EQUAL = 1e-9
"""Errors that differ by less are rounding."""
_STORED = TypeAdapter(list[tuple[int, int, float]])
_LOG = logging.getLogger(__name__)


class _Samples:
    """What the latest steps of a cell took."""

    def __init__(self) -> None:
        self._in_turn: deque[float] = deque()
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._in_turn)

    def add(self, seconds: float) -> None:
        """One more; the oldest goes where they are enough."""
        if len(self) == _SAMPLES:
            del self._by_size[bisect_left(self._by_size, self._in_turn.popleft())]
        self._in_turn.append(seconds)
        insort(self._by_size, seconds)

    @property
    def typical(self) -> float:
        """Of a step that nothing disturbs."""
        fastest = self._by_size[: -(-len(self) // 4)]
        return sum(fastest) / len(fastest)


class PassCosts:
    """Seconds of a step by cell. A step of one token verifies only; a wider one drafts first.

    Args:
        file: where they are kept between starts; None keeps them nowhere.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._samples: dict[Cell, _Samples] = {}
        self._settled: dict[Cell, float] = {}
        """What a step typically takes, of cells that have enough samples."""
        self._planes: dict[bool, NDArray[numpy.float64]] = {}
        """Through the settled cells that draft, and through those that do not."""
        self._answers: dict[Cell, float | None] = {}
        """Of `seconds`; what is concluded is forgotten, as planes are, when a cell settles."""
        self._file = file
        for rows, width, seconds in _read(file):
            for _ in range(_ENOUGH):
                self.observe(rows, width, seconds)

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """A step took so long; what a coarse clock calls nothing is not believed."""
        if seconds <= 0:
            return
        samples = self._samples.setdefault((rows, width), _Samples())
        samples.add(seconds)
        if len(samples) >= _ENOUGH:
            self._settled[rows, width] = self._answers[rows, width] = samples.typical
        if len(samples) == _ENOUGH:
            self._planes.clear()
            self._answers = dict(self._settled)

    def seconds(self, rows: int, width: int) -> float | None:
        """What such a step takes: measured, or concluded from what was; None before anything like it was."""
        cell = (rows, width)
        if cell not in self._answers:
            self._answers[cell] = self._conclude(cell)
        return self._answers[cell]

    def _conclude(self, cell: Cell) -> float | None:
        """By the plane through the steps of its kind, and how far off that is at the nearest of the same width.

        None of another width than the only one so far: it does not tell what a token more takes.
        """
        rows, width = cell
        drafts = width > 1
        alike = [each for each in self._settled if (each[1] > 1) == drafts]
        widths = {each[1] for each in alike}
        if width not in widths and len(widths) < 2:
            return None
        if drafts not in self._planes:
            self._planes[drafts] = _fit(alike, [self._settled[each] for each in alike])
        plane = self._planes[drafts]
        same_width = [each for each in alike if each[1] == width]
        off = 1.0
        if same_width:
            nearest = min(same_width, key=lambda each: abs(each[0] - rows))
            off = self._settled[nearest] / _at(plane, nearest)
        return off * _at(plane, cell)

    def save(self) -> None:
        """Write them for the next start. A cache that cannot be written costs no more than learning anew."""
        settled = [[*cell, seconds] for cell, seconds in sorted(self._settled.items())]
        if self._file is None or not settled:
            return
        part = self._file.with_suffix(f".{secrets.token_hex(8)}")
        with suppress(OSError):
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                part.write_text(json.dumps(settled))
                part.replace(self._file)
            finally:
                part.unlink(missing_ok=True)


def costs_file(engine: Engine, proposer: str) -> Path:
    """Where the costs of an engine on this machine are kept: by config, proposer, processor or GPU, and setting."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    where = [platform.machine(), platform.processor(), *gpus]
    setting = [proposer, str(torch.get_num_threads()), torch.__version__]
    hashed = hashlib.sha256((engine.path / CONFIG_FILE).read_bytes() + "\n".join(where + setting).encode())
    return cache / "dflash-trt" / "pass-costs" / f"{hashed.hexdigest()[:32]}.json"


def _read(file: Path | None) -> list[tuple[int, int, float]]:
    if file is None or not file.exists():
        return []
    try:
        cells = _STORED.validate_json(file.read_bytes())
        if any(rows < 1 or width < 1 or not 0 < seconds < float("inf") for rows, width, seconds in cells):
            raise ValueError("a cost that is none")
    except (OSError, ValidationError, ValueError) as error:
        _LOG.warning("%s: is not a table of costs and is learned anew (%s)", file, str(error).splitlines()[0])
        return []
    return cells


def _fit(cells: list[Cell], seconds: list[float]) -> NDArray[numpy.float64]:
    """What a step, a row and a token take, none of them negative: least squares of relative errors.

    Cells are of one kind; those that do not draft have one token a row, so that rows tell all. What they leave open is
    taken for the cheapest to more requests: what seems cheap is run, and known after that.
    """
    taken = numpy.array(seconds)[:, None]
    features = numpy.array([(1, rows, rows * width) for rows, width in cells]) / taken
    best, least = numpy.zeros(3), float("inf")
    drafts = cells[0][1] > 1
    for used in ([0], [0, 2], [0, 1], [0, 1, 2], [1, 2], [1], [2]) if drafts else ([0], [0, 1], [1]):
        found = numpy.linalg.lstsq(features[:, used], numpy.ones(len(cells)), rcond=None)[0]
        error = float(numpy.square(features[:, used] @ found - 1).sum())
        if found.min() >= 0 and error < least - _EQUAL:
            best, least = numpy.zeros(3), error
            best[used] = found
    return best


def _at(plane: NDArray[numpy.float64], cell: Cell) -> float:
    rows, width = cell
    return float(plane @ (1, rows, rows * width))
