"""A rank beside the first, as `LLM` starts it.

Its command is `python -m dflash_trt.runtime.rank RANK ENGINE_DIR DEVICE STORE PROPOSER`.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import cast

from dflash_trt.engine.directory import open_engine
from dflash_trt.engine.processes import USER_ERROR, end_with_parent
from dflash_trt.errors import UserError
from dflash_trt.runtime.load import find_device, load_executor
from dflash_trt.runtime.parallel_executor import serve
from dflash_trt.runtime.proposer import ProposerName
from dflash_trt.runtime.rank_group import connect, file_store
from dflash_trt.runtime.rank_processes import HERE, LOADED


def main() -> None:
    """Meet the others, load, and follow rank 0 until it closes or is gone."""
    rank, engine_dir, device, store, proposer = int(sys.argv[1]), *sys.argv[2:]
    end_with_parent()
    # What libraries print goes to the log: of stdout the parent awaits two lines, and then its end.
    answer = os.dup(1)
    os.dup2(2, 1)
    status = 0
    try:
        _serve(rank, Path(engine_dir), device or None, store, cast(ProposerName, proposer), answer)
    except UserError as error:
        print(error, file=sys.stderr)
        status = USER_ERROR
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # a broken group's threads abort in an orderly exit


def _serve(rank: int, engine_dir: Path, device: str | None, store: str, proposer: ProposerName, answer: int) -> None:
    engine = open_engine(engine_dir)
    size = engine.config.build_config.tp_size
    where = find_device(device, rank, size)
    os.write(answer, HERE)
    control, ranks = connect(file_store(store, size), rank, size, where, local=True)
    executor = load_executor(engine, where, ranks, proposer)
    os.write(answer, LOADED)
    serve(executor, control)


if __name__ == "__main__":
    main()
