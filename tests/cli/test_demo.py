"""`dflash-trt demo`, on the real model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_trt.cli.demo import PROMPTS
from dflash_trt.inspection.describe import describe
from tests.cli.invoke import invoke


def test_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = invoke(capsys, "demo", "--output_dir", tmp_path / "engine", "--max_output_len", 40, "--device", "cpu")
    assert result.status == 0, result.err
    for prompt in PROMPTS:
        assert prompt in result.out
    lengths = [float(length) for length in re.findall(r"acceptance length (\d+\.\d+)", result.out)]
    assert len(lengths) == 3 and min(lengths) > 1.2
    assert "reverse_string" in result.out
    assert describe(tmp_path / "engine")["build_config"]["dtype"] == "float32"
