"""`dflash-trt doctor`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from dflash_trt.ops.torch_ops import TorchOps
from tests.cli.invoke import invoke

doctor = sys.modules["dflash_trt.cli.doctor"]
"""The module; `dflash_trt.cli.main` gives its name to the command."""


def test_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(invoke(capsys, "doctor", "--format", "json").out)
    assert report["package"]["torch"] == torch.__version__
    assert "cpu" in report["backend"]["torch"]
    assert report["cpu"]["kernels"] in ("ours", "torch's")
    for rows in ("1 row", "8 rows"):
        assert float(report["cpu"][f"a pass of {rows}"].split()[0]) > 0
    assert ("cuda:0" in report["gpu"]) == torch.cuda.is_available()
    text = invoke(capsys, "doctor")
    assert text.status == 0 and "transformers" in text.out


def test_says_what_calibration_lacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        json.loads(invoke(capsys, "doctor", "--format", "json").out)["convert"]["activations and caches"]
        == "fp8, nvfp4"
    )
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    report = json.loads(invoke(capsys, "doctor", "--format", "json").out)
    assert "pip install dflash-trt[quantize]" in report["convert"]["activations and caches"]


class OneGPU:
    """What torch says of a machine with one GPU."""

    name, major, minor, total_memory = "a GPU", 12, 0, 2**35


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds a GPU; what runs on it is each test's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: OneGPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return str(json.loads(invoke(capsys, "doctor", "--format", "json").out)["backend"]["torch"])


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_tried(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in its place."""
    devices, to = [], torch.Tensor.to

    def here(tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
        if arguments == ("cuda:0",):
            devices.append(tensor.dtype)
            return tensor
        return to(tensor, *arguments)

    monkeypatch.setattr(torch.Tensor, "to", here)
    assert told(capsys) == "builds here; runs on cpu, cuda:0 (works)"
    assert set(devices) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}

    linear = TorchOps.linear
    monkeypatch.setattr(TorchOps, "linear", lambda ops, x, weight: linear(ops, x, weight) * 2)
    assert told(capsys) == "builds here; runs on cpu, cuda:0 (computes wrongly in float64)"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_fails_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.Tensor, "to", fail)
    expected = "cuda:0 (fails in float64: CUDA error: no kernel image is available Compile with TORCH_USE_CUDA_DSA)"
    assert told(capsys) == f"builds here; runs on cpu, {expected}"
