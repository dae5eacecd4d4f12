"""The tables of docs/engines.md are those of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.cli.engine_tables import IO_COLUMNS, io_rows, profiles
from dflash_trt.engine.bindings import engine_bindings
from dflash_trt.engine.build import plan_build
from dflash_trt.engine.config import BuildConfig, Dtype
from dflash_trt.engine.support import COMPUTE_CAPABILITIES, is_supported
from dflash_trt.engine.tensorrt_api import TensorRTName
from dflash_trt.inspection.engine import told_bindings
from tests.conftest import TINY

DOCUMENT = (Path(__file__).parents[2] / "docs/engines.md").read_text()


def tables() -> dict[str, list[list[str]]]:
    """Rows of cells of every table, by the last line of text before it or, where it has none, its first cell."""
    found: dict[str, list[list[str]]] = {}
    before, key = "", ""
    for line in DOCUMENT.splitlines():
        if not line.startswith("|"):
            before, key = line or before, ""
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        key = key or (before if before.startswith("**") else cells[0])
        found.setdefault(key, [])
        if set(cells[0]) != {"-"}:
            found[key].append(cells)
    return found


@pytest.mark.parametrize("backend", get_args(TensorRTName))
def test_support(backend: TensorRTName) -> None:
    head, *rows = tables()[backend]
    assert head[1:] == list(COMPUTE_CAPABILITIES[backend])
    features: list[Any] = [*get_args(Dtype), *get_args(QuantAlgo), "FP8 caches"]
    assert sorted(row[0] for row in rows) == sorted(features)
    for feature, *cells in rows:
        expected = [is_supported(feature, backend, each) for each in head[1:]]  # type: ignore[arg-type]
        assert [cell == "yes" for cell in cells] == expected and set(cells) <= {"yes", "no"}


@pytest.mark.parametrize("backend", get_args(TensorRTName))
def test_inputs_and_outputs(backend: TensorRTName, tmp_path: Path) -> None:
    target, drafter = open_target(TINY / "target"), open_drafter(TINY / "drafter")
    build = BuildConfig(dtype="bfloat16", max_batch_size=4, max_seq_len=2048)
    config = plan_build(target, drafter, build, tmp_path / "engine", backend, "sm120").config
    for name, bindings in engine_bindings(config).items():
        told = told_bindings(bindings)
        head, *rows = tables()[f"**{name.capitalize()}, `{backend}`** ({profiles(told)})"]
        assert head == list(IO_COLUMNS)
        assert rows == [list(row) for row in io_rows(told)]
