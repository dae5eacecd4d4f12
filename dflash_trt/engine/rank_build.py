"""Builds one rank's engines: `python -m dflash_trt.engine.rank_build ENGINE_DIR PARTS_DIR RANK TIMING_IN TIMING_OUT`.

A process for each: TensorRT builds one network at a time in a process, and what a failed build leaves behind goes with
it. Each line on stdout is one report of progress.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from dflash_trt.engine.bindings import EMBEDDING, HEAD, Model, has_head_input
from dflash_trt.engine.directory import Engine, open_engine, rank_files
from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.engine.plans import PlanFile, PlanRecord, write_shared
from dflash_trt.engine.processes import USER_ERROR, end_with_parent
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import Record, TimingCache, build_plan
from dflash_trt.engine.weights import load_rank
from dflash_trt.errors import UserError, access
from dflash_trt.models.pair import Pair
from dflash_trt.ops.base import Tensor

Report = Callable[[Model, str, float], None]
"""Told the engine, the phase, and how much of the engine is built, 0 to 1."""
RECORDS: dict[Model, Record] = {"target": record_target, "drafter": record_drafter}


def main() -> None:
    """Build, and report on what was stdout: what libraries print there goes to stderr."""
    engine_dir, parts, rank, timing_in, timing_out = sys.argv[1:]
    end_with_parent()
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(which: Model, phase: str, done: float) -> None:
        print(json.dumps([which, phase, done]), file=reports)

    status = 0
    try:
        timing = TimingCache(Path(timing_in) if timing_in else None) if timing_in or timing_out else None
        build_rank(open_engine(Path(engine_dir)), Path(parts), int(rank), timing, report)
        if timing is not None and timing_out:
            with access(Path(timing_out), "written"):
                Path(timing_out).write_bytes(timing.content)
    except UserError as error:
        print(error, file=sys.stderr)
        status = USER_ERROR
    except BaseException:  # what got past here would end in an orderly exit
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # the thread that reads stdin holds its lock, for which Python aborts in an orderly exit


def build_rank(
    engine: Engine,
    parts: Path,
    rank: int,
    timing: TimingCache | None = None,
    report: Report = lambda which, phase, done: None,
) -> None:
    """Build a rank's engines from its weights, and write them with the weights that they share.

    The weights stay mapped, and one network at a time is held.

    Args:
        parts: directory with the rank's weights, as the torch backend has them; they are removed.

    Raises:
        UserError: TensorRT refuses, or a file cannot be read or written.
    """
    config, tensorrt = engine.config, load_tensorrt(engine.config.builder.tensorrt)
    pair = load_rank(config, parts, rank, torch.device("cpu"))
    shared, *plans = engine.tensorrt_files(rank)
    records: dict[Model, PlanRecord] = {}
    for (which, record), file in zip(RECORDS.items(), plans, strict=True):
        with PlanFile(file) as plan:
            build_plan(tensorrt, record, pair, config, rank, plan.write, timing, partial(report, which))
        records[which] = plan.record
    write_shared(shared, _shared_weights(pair), records, config.build_id)
    for file in rank_files(parts, rank):
        with access(file, "removed"):
            file.unlink()


def _shared_weights(pair: Pair) -> dict[str, Tensor]:
    shared = {EMBEDDING: pair.target_weights.embedding}
    if has_head_input(pair.target):
        shared[HEAD] = pair.target_weights.head.weight
    return shared


if __name__ == "__main__":
    main()
