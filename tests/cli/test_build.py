"""`dflash-trt build` and `dflash-trt inspect` on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.engine.directory import open_engine
from tests.cli.invoke import invoke
from tests.conftest import TINY
from tests.tiny_models import random_drafter, random_target


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
            "tp_size": 1,
        }
    files = [
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in "01"
    ]
    assert files[0] == files[1]


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["build", "--checkpoint_dir", TINY, "--output_dir", tmp_path / "some" / "engine"]
    dry = invoke(capsys, *options, "--dry_run")
    assert dry.status == 0 and "would hold" in dry.out
    assert not list(tmp_path.iterdir())
    assert invoke(capsys, *options).out == dry.out.replace("would hold ", "")


def test_says_what_weights_and_caches_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    result = invoke(capsys, "build", "--checkpoint_dir", TINY, "--output_dir", engine, "--max_batch_size", 100)
    described = json.loads(invoke(capsys, "inspect", engine, "--format", "json").out)
    assert f"{described['bytes'] / 1e6:.1f} MB of weights" in result.out
    assert f"{described['cache_bytes'] / 1e6:.1f} MB of caches" in result.out
    # Slots, positions with the block, keys and values, layers, two heads of 32, two bytes.
    assert described["cache_bytes"] == 100 * (2048 + 8) * 2 * (4 + 2) * (2 * 32) * 2


def test_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What all hold, what each holds and what padding costs, before and after; as many files as ranks."""
    options = ["build", "--checkpoint_dir", TINY, "--tp_size", 4, "--dtype", "float64", "--output_dir", tmp_path / "e"]
    dry, built = invoke(capsys, *options, "--dry_run"), invoke(capsys, *options, "--workers", 3)
    assert built.status == 0 and built.out == dry.out.replace("would hold ", "")
    described = json.loads(invoke(capsys, "inspect", tmp_path / "e", "--format", "json").out)
    each = described["bytes"] / 4 / 1e6
    assert f"{described['bytes'] / 1e6:.1f} MB of weights in float64" in built.out
    # Three rows of 128 in embedding and head; the tiny target ties them.
    padding = f"{3 * 128 * 8 / 1e6:.1f} MB of it all padding: target vocab_size 697 to 700"
    assert f", {each:.1f} MB on each of 4 ranks, {padding}; " in built.out
    assert f"{described['cache_bytes'] / 1e6:.1f} MB of caches more on each rank" in built.out
    assert described["cache_bytes"] == 8 * (2048 + 8) * 2 * (4 + 2) * (1 * 32) * 8
    for part in ("target", "drafter"):
        assert sorted(path.name for path in (tmp_path / "e" / part).iterdir()) == [
            f"rank{rank}.safetensors" for rank in range(4)
        ]


@pytest.mark.parametrize(("trained", "expected"), [(512, 512), (4096, 2048)])
def test_default_length_is_the_targets_at_most_2048(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trained: int, expected: int
) -> None:
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target", max_position_embeddings=trained))
    engine = tmp_path / "engine"
    result = invoke(capsys, "build", "--checkpoint_dir", tmp_path, "--output_dir", engine, "--backend", "torch")
    assert result.status == 0, result.err
    config = open_engine(engine).config
    assert config.build_config.max_seq_len == expected
    assert config.builder.backend == "torch"


def test_inspect_tells_what_a_directory_is(capsys: pytest.CaptureFixture[str]) -> None:
    for directory, kind in (("target", "target"), ("drafter", "DFlash drafter")):
        result = invoke(capsys, "inspect", TINY / directory)
        assert result.status == 0 and kind in result.out


def test_inspect_in_a_narrow_terminal_cuts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = invoke(capsys, "inspect", TINY / "target").out
    assert "…" not in out and "None" not in out
