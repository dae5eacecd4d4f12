"""Whether a machine can build or run an engine, and what is said where it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_trt.engine.compatibility import builder_here, check_runs_here, gpu_here, requirements, why_not
from dflash_trt.engine.config import Builder
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.errors import UserError
from dflash_trt.plugins.plugin_hash import plugin_hash
from dflash_trt.runtime.llm import LLM
from tests.tensorrt_engines import TensorRTEngines

RTX = Builder("tensorrt_rtx", "1.7.1.116", "sm120")
FULL = Builder("tensorrt", "11.0.0", "sm103", "0123456789abcdef")


@pytest.mark.parametrize(
    ("builder", "here", "expected"),
    [
        (RTX, ("1.7.1.116", "sm120", None), None),
        (FULL, ("11.0.0", "sm103", "0123456789abcdef"), None),
        (
            RTX,
            (None, "sm120", None),
            "was built by tensorrt_rtx 1.7.1.116 for sm120, tensorrt_rtx is not installed here; install that version, "
            "or build it again",
        ),
        (
            RTX,
            ("1.8.0.1", "sm120", None),
            "was built by tensorrt_rtx 1.7.1.116 for sm120, tensorrt_rtx is 1.8.0.1 here; install that version, or "
            "build it again",
        ),
        (
            RTX,
            ("1.7.1.116", "sm89", None),
            "was built by tensorrt_rtx 1.7.1.116 for sm120, this machine has a GPU of sm89; it needs tensorrt_rtx "
            "1.7.1.116 and a GPU of compute capability sm120",
        ),
        (
            RTX,
            ("1.7.1.116", None, None),
            "was built by tensorrt_rtx 1.7.1.116 for sm120, this machine has no GPU; it needs tensorrt_rtx 1.7.1.116 "
            "and a GPU of compute capability sm120",
        ),
        (
            FULL,
            ("11.0.0", "sm103", "fedcba9876543210"),
            "was built by tensorrt 11.0.0 for sm103 with plugin 0123456789abcdef, the plugin here is fedcba9876543210; "
            "build it again",
        ),
    ],
)
def test_why_not(builder: Builder, here: tuple[str | None, str | None, str | None], expected: str | None) -> None:
    assert why_not(builder, *here) == expected


def test_builders_of_this_machine() -> None:
    assert builder_here("torch", None) == Builder("torch", torch.__version__)
    version = load_tensorrt("tensorrt_rtx").version
    assert builder_here("tensorrt_rtx", "sm89") == Builder("tensorrt_rtx", version, "sm89")
    assert builder_here("tensorrt", "sm90").plugin_hash == plugin_hash()
    assert requirements(builder_here("torch", None)) == "a CPU, or a CUDA GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may have the GPU")
def test_an_engine_for_a_gpu_that_is_not_here(tensorrt_engines: TensorRTEngines) -> None:
    assert gpu_here() is None
    engine = tensorrt_engines.engine("bf16")
    version = load_tensorrt("tensorrt_rtx").version
    for open_it in (lambda: LLM(engine.path), lambda: check_runs_here(engine, torch.device("cpu"))):
        with pytest.raises(UserError) as refused:
            open_it()
        assert str(refused.value) == (
            f"{engine.path}: was built by tensorrt_rtx {version} for sm120, this machine has no GPU; it needs "
            f"tensorrt_rtx {version} and a GPU of compute capability sm120"
        )


def test_the_gpu_that_is_named_is_the_one_that_counts(
    tensorrt_engines: TensorRTEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with two GPUs, told of here by what torch would say of them."""
    capabilities = {None: (12, 0), 0: (12, 0), 1: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[None if device is None else device.index]
    )
    assert [gpu_here(), *(gpu_here(torch.device(f"cuda:{index}")) for index in range(2))] == ["sm120", "sm120", "sm90"]
    engine = tensorrt_engines.engine("bf16")
    for device in ("cuda", "cuda:0", "cpu"):
        check_runs_here(engine, torch.device(device))
    with pytest.raises(UserError, match=r"for sm120, this machine has a GPU of sm90"):
        check_runs_here(engine, torch.device("cuda:1"))


def test_a_build_that_cannot_be_done_here_is_planned_but_not_begun(
    tensorrt_engines: TensorRTEngines, tmp_path: Path
) -> None:
    """`tensorrt` is not on the package index, and builds on its GPU only."""
    planned = tensorrt_engines.plan("bf16", tmp_path / "engine")
    build = replace(planned, config=replace(planned.config, builder=builder_here("tensorrt", "sm103")))
    with pytest.raises(UserError, match=r"tensorrt"):
        build.write()
    assert not list(tmp_path.iterdir())


def test_plans_differ_by_builder(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> None:
    """Each build has an id of its own; so have files of the same weights for another GPU."""
    ids = {tensorrt_engines.plan("bf16", tmp_path / "e", each).config.build_id for each in ("sm89", "sm120")}
    assert len(ids) == 2
