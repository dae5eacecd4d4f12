"""Without Triton one line says so, and the torch backend is not asked for it."""

from __future__ import annotations

import sys

import pytest
import torch

from dflash_trt.engine.compatibility import builder_here, check_builds_here
from dflash_trt.engine.config import Builder
from dflash_trt.errors import UserError
from dflash_trt.plugins.installed_triton import require_triton
from dflash_trt.runtime.load import load_executor
from tests.tensorrt_engines import TensorRTEngines


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


def test_it_is_here() -> None:
    require_triton("this")


def test_builds_with_the_plugin_are_refused_before_they_begin(without_triton: None) -> None:
    with pytest.raises(UserError, match=r"^triton is not installed, which the plugin needs; pip install dflash-trt\["):
        check_builds_here(Builder("tensorrt", "11.0.0", "sm103", "0123456789abcdef"))


def test_a_build_can_be_planned(without_triton: None) -> None:
    assert builder_here("tensorrt", "sm103").plugin_hash


def test_engines_of_tensorrt_are_refused_before_they_are_loaded(
    without_triton: None, tensorrt_engines: TensorRTEngines
) -> None:
    with pytest.raises(
        UserError, match=r"^triton is not installed, which running an engine of tensorrt_rtx needs; pip"
    ):
        load_executor(tensorrt_engines.engine("bf16"), torch.device("cpu"))
