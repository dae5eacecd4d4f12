"""`dflash-trt doctor`."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cli.invoke import invoke


def test_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(invoke(capsys, "doctor", "--format", "json").out)
    assert report["package"]["torch"] == torch.__version__
    assert "cpu" in report["backend"]["torch"]
    assert ("cuda:0" in report["gpu"]) == torch.cuda.is_available()
    text = invoke(capsys, "doctor")
    assert text.status == 0 and "transformers" in text.out
