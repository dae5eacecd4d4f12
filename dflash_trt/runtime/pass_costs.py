"""What a decode step takes on this machine: measured when an engine is first loaded, and remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy
import torch
from pydantic import TypeAdapter, ValidationError

from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.engine.directory import Engine
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.proposer import Sequences
from dflash_trt.runtime.sampling import Sampling, SamplingParams
from dflash_trt.runtime.verifier import Step

Cell = tuple[int, int]
"""Sequences that decode, and tokens that the pass has of each."""
_ROUNDS = 5
"""Of which the fastest counts: a GPU's first pass of a shape is slow, and the second captures its graph."""
_BUDGET = 3.0
"""Seconds after which no further round begins. One round is always run."""
_STORED = TypeAdapter(list[tuple[int, int, float]])
_LOG = logging.getLogger(__name__)


class PassCosts:
    """Seconds of a decode step by sequences and tokens of each. A step of one token verifies only; a wider one drafts.

    Args:
        measured: a grid of cells, with one token of each sequence among its widths.
    """

    def __init__(self, measured: Mapping[Cell, float]) -> None:
        self.measured = measured
        self._known = dict(measured)

    def seconds(self, sequences: int, width: int) -> float:
        """Measured, or between the nearest that are."""
        cell = (sequences, width)
        if cell not in self._known:
            self._known[cell] = self._between(sequences, width)
        return self._known[cell]

    def _between(self, sequences: int, width: int) -> float:
        of_width = [self._at_width(rows, width) for rows in self._rows]
        return float(numpy.interp(sequences, self._rows, of_width))

    def _at_width(self, rows: int, width: int) -> float:
        if width == 1:
            return self.measured[rows, 1]
        return float(numpy.interp(width, self._widths, [self.measured[rows, each] for each in self._widths]))

    @cached_property
    def _rows(self) -> list[int]:
        return sorted({rows for rows, _ in self.measured})

    @cached_property
    def _widths(self) -> list[int]:
        """Those with draft tokens."""
        return sorted({width for _, width in self.measured if width > 1})


def grid(executor: Executor) -> list[Cell]:
    """The cells that are measured: powers of two, and the largest of either."""
    return [
        (rows, width) for rows in _doubling(executor.max_batch_size, 4) for width in _doubling(executor.max_window, 2)
    ]


def measure(executor: Executor, on_progress: Callable[[int, int], None]) -> PassCosts:
    """Run steps of every cell of the grid, in turn, so that what else the machine does slows all of them alike.

    They overwrite the executor's slots.

    Args:
        on_progress: told how many steps were run, and of how many at most.
    """
    cells = grid(executor)
    fastest = dict.fromkeys(cells, float("inf"))
    began = time.perf_counter()
    for round_ in range(_ROUNDS):
        for index, cell in enumerate(cells):
            started = time.perf_counter()
            _run(executor, *cell)
            fastest[cell] = min(fastest[cell], time.perf_counter() - started)
            on_progress(round_ * len(cells) + index + 1, _ROUNDS * len(cells))
        if time.perf_counter() - began > _BUDGET:
            break
    return PassCosts(fastest)


def remembered(file: Path) -> PassCosts | None:
    """What was saved there; None where nothing was, or nothing that can be read."""
    if not file.exists():
        return None
    try:
        measured = {(rows, width): seconds for rows, width, seconds in _STORED.validate_json(file.read_bytes())}
        if not _is_grid(measured):
            raise ValueError("no grid of costs")
    except (OSError, ValidationError, ValueError) as error:
        _LOG.warning("%s: is not a table of costs and is measured anew (%s)", file, str(error).splitlines()[0])
        return None
    return PassCosts(measured)


def remember(costs: PassCosts, file: Path) -> None:
    """Save them for the next start. A cache that cannot be written costs no more than measuring again."""
    part = file.with_suffix(f".{secrets.token_hex(8)}")
    with suppress(OSError):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps([[*cell, seconds] for cell, seconds in sorted(costs.measured.items())]))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


def costs_file(engine: Engine, proposer: str) -> Path:
    """Where the costs of an engine on this machine are kept: by config, proposer, processor or GPU, and setting."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    where = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *gpus]
    setting = [proposer, str(torch.get_num_threads()), torch.__version__]
    hashed = hashlib.sha256((engine.path / CONFIG_FILE).read_bytes() + "\n".join(where + setting).encode())
    return cache / "dflash-trt" / "step-costs" / f"{hashed.hexdigest()[:32]}.json"


def _is_grid(measured: Mapping[Cell, float]) -> bool:
    rows, widths = {cell[0] for cell in measured}, {cell[1] for cell in measured}
    whole = measured.keys() == {(each, width) for each in rows for width in widths}
    in_range = all(0 < seconds < float("inf") for seconds in measured.values()) and min(rows, default=0) > 0
    return whole and in_range and 1 in widths and min(widths) > 0


def _doubling(most: int, factor: int) -> list[int]:
    """1, then `factor` times as many, up to `most`, which is among them."""
    values = [1]
    while values[-1] * factor < most:
        values.append(values[-1] * factor)
    return values if values[-1] == most else [*values, most]


def _run(executor: Executor, rows: int, width: int) -> None:
    """A step of sequences that consist of their anchor."""
    anchors, empty = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    slots, sampling = torch.arange(rows), Sampling.of([SamplingParams(seed=0)] * rows, [()] * rows)
    tokens = anchors[:, None].expand(-1, width)
    if width > 1:
        texts: Sequence[Sequence[int]] = [[anchor] for anchor in anchors.tolist()]
        executor.propose(Sequences(anchors, empty, slots, sampling, texts), width - 1)
    executor.verify(Step(tokens, empty + width, empty + width - 1, empty, slots, sampling))
