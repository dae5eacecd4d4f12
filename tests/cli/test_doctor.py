"""`dflash-trt doctor`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.cli.invoke import invoke

doctor = sys.modules["dflash_trt.cli.doctor"]
"""The module; `dflash_trt.cli.main` gives its name to the command."""


def test_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(invoke(capsys, "doctor", "--format", "json").out)
    assert report["package"]["torch"] == torch.__version__
    assert "cpu" in report["backend"]["torch"]
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
