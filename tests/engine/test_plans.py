"""Plans that are missing, damaged or of another build are refused before TensorRT sees them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.directory import Engine, open_engine
from dflash_trt.engine.network import record_drafter
from dflash_trt.engine.plans import check_plans, open_plans
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import build_plan
from dflash_trt.errors import UserError
from dflash_trt.models.pair import load_pair
from tests.conftest import TINY
from tests.tensorrt_engines import TensorRTEngines


@pytest.fixture
def engine(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> Engine:
    """One of two ranks that a test may spoil."""
    shutil.copytree(tensorrt_engines.engine("bf16", 2).path, tmp_path / "engine")
    return open_engine(tmp_path / "engine")


def test_a_plan_is_what_was_built(engine: Engine) -> None:
    check_plans(engine)
    for rank in range(2):
        plans = open_plans(engine, rank)
        for which, file in plans.files.items():
            with plans.read(which) as plan:
                assert plan[:] == file.read_bytes()


@pytest.mark.parametrize("name", ["target/rank1.engine", "drafter/rank0.engine", "target/rank0.safetensors"])
def test_a_missing_file(engine: Engine, name: str) -> None:
    (engine.path / name).unlink()
    with pytest.raises(UserError) as refused:
        check_plans(engine)
    assert str(refused.value) == f"{engine.path / name}: is missing; the engine has 2 ranks, see config.json"


def test_a_plan_that_is_cut_off(engine: Engine) -> None:
    file = engine.path / "drafter/rank1.engine"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(UserError) as refused:
        check_plans(engine)
    assert str(refused.value) == (
        f"{file}: has {len(content) - 1} bytes, {engine.path}/target/rank1.safetensors says {len(content)}: it is "
        "damaged or of another build; build the engine again"
    )


@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_plan_with_a_changed_bit(engine: Engine, where: float) -> None:
    file = engine.path / "target/rank0.engine"
    content = bytearray(file.read_bytes())
    content[int(where * len(content)) if where > 0 else int(where)] ^= 1
    file.write_bytes(content)
    check_plans(engine)
    with pytest.raises(UserError, match=r"target/rank0\.engine: is damaged, its content is not what was built"):
        open_plans(engine, 0).read("target")


def test_ranks_that_are_swapped(engine: Engine) -> None:
    """Their drafters' plans have one size."""
    files = [engine.path / f"drafter/rank{rank}.engine" for rank in range(2)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        open_plans(engine, 0).read("drafter")


def test_files_of_another_build(engine: Engine, tensorrt_engines: TensorRTEngines) -> None:
    other = tensorrt_engines.engine("bf16", 1)
    for file in other.tensorrt_files(0):
        shutil.copy(file, engine.path / file.relative_to(other.path))
    with pytest.raises(UserError) as refused:
        check_plans(engine)
    assert str(refused.value) == (
        f"{engine.path}/target/rank0.safetensors: is of another build: its build_id is {other.config.build_id}, "
        f"config.json says {engine.config.build_id}; build the engine again"
    )


def test_a_plan_that_cannot_be_written(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> None:
    """What writing raises comes out of TensorRT as it was."""
    config = tensorrt_engines.plan("bf16", tmp_path / "engine").config
    target, drafter = open_target(TINY / "target"), open_drafter(TINY / "drafter")
    pair = load_pair(target, drafter, positions=136, dtype=torch.bfloat16, device=torch.device("cpu"))

    def full(piece: bytes) -> None:
        raise UserError("no space left on device")

    with pytest.raises(UserError, match=r"^no space left on device$"):
        build_plan(load_tensorrt("tensorrt_rtx"), record_drafter, pair, config, 0, full)
