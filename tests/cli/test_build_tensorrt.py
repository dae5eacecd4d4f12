"""`dflash-trt build` for TensorRT backends, `inspect` on what it wrote, and what they refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dflash_trt.engine.compatibility import MISSING, installed_version
from dflash_trt.engine.support import COMPUTE_CAPABILITIES
from tests.cli.invoke import invoke
from tests.conftest import TINY
from tests.tensorrt_engines import TensorRTEngines

RTX = ("--backend", "tensorrt_rtx", "--compute_capability", "sm120")


def test_build_and_inspect(
    capsys: pytest.CaptureFixture[str],
    tensorrt_engines: TensorRTEngines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A converted checkpoint becomes an engine, and nothing but the summary is printed."""
    monkeypatch.setenv("COLUMNS", "160")
    engine = tmp_path / "engine"
    options = ["--checkpoint_dir", tensorrt_engines.checkpoints("nvfp4"), "--output_dir", engine, *RTX]
    built = invoke(capsys, "build", *options, "--max_batch_size", 4, "--max_seq_len", 2048)
    assert built.status == 0 and not built.err, built.err
    assert "backend tensorrt_rtx for sm120; running it takes 12.7 MB of caches more" in built.out
    inspected = invoke(capsys, "inspect", engine)
    assert inspected.status == 0 and not inspected.err
    described = json.loads(invoke(capsys, "inspect", engine, "--format", "json").out)
    assert described["kind"] == "engine directory" and described["problems"] == []
    version = installed_version("tensorrt_rtx")
    assert described["builder"] == {
        "backend": "tensorrt_rtx",
        "version": version,
        "compute_capability": "sm120",
        "plugin_hash": None,
    }
    assert described["needs"] == f"tensorrt_rtx {version} and a GPU of compute capability sm120"
    assert described["quantization"] == {"target": "NVFP4", "drafter": "NVFP4"}
    assert described["cache_bytes"] == 4 * (2048 + 16) * 2 * (4 + 2) * (2 * 32) * 2
    (sizes,) = described["ranks"]
    assert sizes["rank"] == 0
    assert sizes["target_bytes"] == (engine / "target/rank0.engine").stat().st_size
    assert sizes["drafter_bytes"] == (engine / "drafter/rank0.engine").stat().st_size
    assert 697 * 128 * 2 < sizes["shared_bytes"] < 697 * 128 * 2 + 1000
    inputs = {binding["name"]: binding for binding in described["engines"]["target"]["inputs"]}
    assert inputs["embedding"]["shape"] == [697, 128] and inputs["tokens"]["shape"] == ["batch", "rows"]
    assert described["engines"]["drafter"]["profiles"] == {"decode": {"batch": [1, 4, 4]}}
    for text in ("tensorrt_rtx", "target.{0..3}.keys", "logits", "sm120"):
        assert text in inspected.out


def test_dry_run_tells_what_would_be_built(
    capsys: pytest.CaptureFixture[str], tensorrt_engines: TensorRTEngines, tmp_path: Path
) -> None:
    """And that is what is built: of the engine, the same tables."""
    engine = tensorrt_engines.engine("fp8", 2)
    checkpoints, output = tensorrt_engines.checkpoints("fp8"), tmp_path / "engine"
    options = ["--checkpoint_dir", checkpoints, "--output_dir", output, *RTX, "--tp_size", 2, "--dtype", "bfloat16"]
    options += ["--max_batch_size", 4, "--max_seq_len", 128, "--max_num_tokens", 64, "--dry_run"]
    planned = json.loads(invoke(capsys, "build", *options, "--format", "json").out)
    described = json.loads(invoke(capsys, "inspect", engine.path, "--format", "json").out)
    for field in ("builder", "build_config", "engines", "cache_bytes"):
        assert planned[field] == described[field]
    memory = planned["memory"]
    assert memory.pop("total") == sum(memory.values())
    text = invoke(capsys, "build", *options)
    assert text.status == 0 and "would hold" in text.out and "drafter engine; decode: batch 1 to 4" in text.out
    assert f"{memory['target_weights'] / 1e6:.1f} MB" in text.out
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(installed_version("tensorrt") is not None, reason="it is installed here")
def test_dry_run_for_a_builder_that_is_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a data-centre GPU needs can be seen anywhere; building says what is missing."""
    options = ["--checkpoint_dir", TINY, "--output_dir", tmp_path / "engine", "--backend", "tensorrt"]
    options += ["--compute_capability", "sm103"]
    planned = json.loads(invoke(capsys, "build", *options, "--dry_run", "--format", "json").out)
    assert planned["builder"]["version"] == MISSING and planned["builder"]["plugin_hash"]
    outputs = [binding["name"] for binding in planned["engines"]["target"]["outputs"]]
    assert {"chosen", "accepted", "next", "drafter.keys.updated"} <= set(outputs)
    built = invoke(capsys, "build", *options)
    assert built.status == 2 and built.err.count("\n") == 1
    assert built.err.startswith("dflash-trt: cannot load tensorrt (") and "pip install tensorrt-cu13" in built.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "tensorrt_rtx"], "compute_capability is not given"),
        (["--backend", "tensorrt_rtx", "--compute_capability", "12.0"], "compute_capability is 12.0, backend"),
        (["--compute_capability", "sm120"], "backend is torch, whose engines run on any GPU"),
        ([*RTX, "--dtype", "float64"], "dtype is float64, which tensorrt_rtx does not build for sm120"),
        ([*RTX, "--input_timing_cache", "cache"], "input_timing_cache is cache, backend is tensorrt_rtx"),
        (
            [*RTX, "--output_timing_cache", "cache", "--dry_run"],
            "output_timing_cache is cache, backend is tensorrt_rtx",
        ),
        (["--output_timing_cache", "cache"], "output_timing_cache is cache, backend is torch"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], message: str) -> None:
    result = invoke(capsys, "build", "--checkpoint_dir", TINY, "--output_dir", tmp_path / "engine", *options)
    assert result.status == 2 and message in result.err and result.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_inspect_names_every_damaged_plan(
    capsys: pytest.CaptureFixture[str], tensorrt_engines: TensorRTEngines, tmp_path: Path
) -> None:
    shutil.copytree(tensorrt_engines.engine("bf16", 2).path, tmp_path / "engine")
    for name in ("target/rank0.engine", "drafter/rank1.engine"):
        file = tmp_path / "engine" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 255
        file.write_bytes(content)
    result = invoke(capsys, "inspect", tmp_path / "engine")
    assert result.status == 2
    for name in ("target/rank0.engine", "drafter/rank1.engine"):
        assert f"{tmp_path}/engine/{name}: is damaged" in result.err
    assert "in the 2 ways above" in result.err


def test_running_says_what_it_needs(capsys: pytest.CaptureFixture[str], tensorrt_engines: TensorRTEngines) -> None:
    engine = tensorrt_engines.engine("bf16").path
    result = invoke(capsys, "run", "--engine_dir", engine, "--prompt", "hello")
    assert result.status == 2 and result.err.count("\n") == 1
    assert f"{engine}: " in result.err and "tensorrt_rtx" in result.err


def test_doctor_says_which_backends_build_here(capsys: pytest.CaptureFixture[str]) -> None:
    backend = json.loads(invoke(capsys, "doctor", "--format", "json").out)["backend"]
    version = installed_version("tensorrt_rtx")
    known = ", ".join(COMPUTE_CAPABILITIES["tensorrt_rtx"])
    assert backend["tensorrt_rtx"].startswith(f"{version}, builds here for {known}; runs on ")
    if not torch.cuda.is_available():
        assert backend["tensorrt_rtx"].endswith("; runs on no GPU of this machine")
    if installed_version("tensorrt") is None:
        assert "pip install tensorrt-cu13" in backend["tensorrt"]
