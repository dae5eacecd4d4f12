"""`dflash-trt build` and `dflash-trt inspect` on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.invoke import invoke
from tests.conftest import TINY


def test_both_ways_to_name_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ways = [["--checkpoint_dir", TINY], ["--target_dir", TINY / "target", "--drafter_dir", TINY / "drafter"]]
    for number, way in enumerate(ways):
        engine = tmp_path / str(number)
        result = invoke(capsys, "build", *way, "--output_dir", engine, "--max_seq_len", 256, "--max_batch_size", 3)
        assert result.status == 0, result.err
        assert str(engine) in result.out
        described = json.loads(invoke(capsys, "inspect", engine, "--format", "json").out)
        assert described["build_config"] == {
            "dtype": "float16",
            "max_batch_size": 3,
            "max_seq_len": 256,
            "max_num_tokens": 512,
        }
    files = [
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in "01"
    ]
    assert files[0] == files[1]


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = invoke(capsys, "build", "--checkpoint_dir", TINY, "--output_dir", tmp_path / "engine", "--dry_run")
    assert result.status == 0 and "would hold" in result.out
    assert not list(tmp_path.iterdir())


def test_inspect_tells_what_a_directory_is(capsys: pytest.CaptureFixture[str]) -> None:
    for directory, kind in (("target", "target"), ("drafter", "DFlash drafter")):
        result = invoke(capsys, "inspect", TINY / directory)
        assert result.status == 0 and kind in result.out
