"""`dflash-trt convert` from option to checkpoint, and on to an engine that decodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from tests.cli.invoke import invoke
from tests.conftest import TINY
from tests.tiny_models import random_drafter, random_target


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations for the tiny pair, one of its training prompts a row."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    prompts = (TINY / "prompts.txt").read_text().splitlines()[:4]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair."""
    directory = tmp_path_factory.mktemp("source")
    random_drafter(directory / "drafter", random_target(directory / "target"))
    return directory


def test_each_model_gets_its_own_format_and_the_engine_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Path
) -> None:
    pair = ("--target_dir", TINY / "target", "--drafter_dir", TINY / "drafter")
    formats = ("--qformat", "nvfp4", "--drafter_qformat", "fp8", "--kv_cache_qformat", "fp8")
    output = tmp_path / "out"
    result = invoke(
        capsys, "convert", *pair, "--output_dir", output, *formats, "--calib_dataset", text, "--calib_size", 3
    )
    assert (result.status, result.err) == (0, "")
    target_line, drafter_line = result.out.splitlines()
    assert "in NVFP4, caches in FP8" in target_line and "calibration: ModelOpt 0.47.0" in target_line
    assert "in FP8, " in drafter_line and "caches" not in drafter_line and "3 samples" in drafter_line

    target, drafter = open_target(output / "target").config, open_drafter(output / "drafter").config
    assert target.quantization is not None and drafter.quantization is not None
    assert (target.quantization.quant_algo, target.quantization.kv_cache_quant_algo) == ("NVFP4", "FP8")
    assert (drafter.quantization.quant_algo, drafter.quantization.kv_cache_quant_algo) == ("FP8", None)

    for model in ("target", "drafter"):
        assert invoke(capsys, "inspect", output / model).status == 0
    engine = tmp_path / "engine"
    assert invoke(capsys, "build", "--checkpoint_dir", output, "--output_dir", engine).status == 0
    prompt = "Write the diary of Clara the sailor, who seeks the old map."
    run = ("run", "--engine_dir", engine, "--prompt", prompt, "--max_output_len", 48, "--format", "json")
    speculative, plain = (
        json.loads(invoke(capsys, *run, *more).out) for more in (("--verify_window", "8"), ("--no_speculation",))
    )
    assert speculative["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    assert speculative["stats"]["target_passes"] < plain["stats"]["target_passes"]


def test_weights_alone_need_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path) -> None:
    arguments = ("--target_dir", source / "target", "--output_dir", tmp_path / "out", "--qformat", "w4a16_nvfp4")
    result = invoke(capsys, "convert", *arguments)
    assert result.status == 0
    assert "28 linear layers in W4A16_NVFP4" in result.out
    assert "calibration: every weight's own largest magnitude" in result.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["target"]


def test_patterns_of_one_model_do_not_reach_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path
) -> None:
    result = invoke(
        capsys,
        "convert",
        *("--target_dir", source / "target", "--drafter_dir", source / "drafter", "--output_dir", tmp_path / "out"),
        *("--qformat", "w4a16_nvfp4", "--drafter_qformat", "w4a16_nvfp4"),
        *("--exclude_modules", "*layers.0.*", "--drafter_exclude_modules", "*.mlp.*"),
    )
    assert result.status == 0
    excluded = [
        json.loads((tmp_path / "out" / model / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
        for model in ("target", "drafter")
    ]
    assert excluded[0] == ["lm_head", "model.embed_tokens", "model.layers.0*"]
    assert excluded[1] == ["fc", "layers.0.mlp*", "layers.1.mlp*"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--qformat", "fp8"), "calib_dataset: is needed"),
        (("--qformat", "bf16", "--calib_size", "4"), "--calib_size needs --calib_dataset"),
        (("--qformat", "bf16", "--drafter_qformat", "fp8"), "--drafter_qformat needs --drafter_dir"),
        (("--qformat", "int4"), "'int4' is not one of 'bf16', 'fp8', 'nvfp4', 'w4a16_nvfp4'"),
        (("--qformat", "nvfp4", "--exclude_modules", "*"), "exclude_modules *: leaves nothing of"),
        (("--qformat", "w4a16_nvfp4", "--exclude_modules", "*.qkv"), "exclude_modules *.qkv: matches no linear layer"),
        (("--qformat", "fp8", "--calib_dataset", "gone.jsonl"), "gone.jsonl: no such file"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path, options: tuple[str, ...], message: str
) -> None:
    result = invoke(capsys, "convert", "--target_dir", source / "target", "--output_dir", tmp_path / "out", *options)
    assert result.status == 2
    assert message in result.err and len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_target(tmp_path / "target")
    tensors = load_file(tmp_path / "target/model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("inf")
    save_file(tensors, tmp_path / "target/model.safetensors", metadata={"format": "pt"})
    arguments = ("--target_dir", tmp_path / "target", "--output_dir", tmp_path / "out", "--qformat", "w4a16_nvfp4")
    result = invoke(capsys, "convert", *arguments)
    assert result.status == 2
    assert "model.layers.1.self_attn.o_proj.weight: 1 of its" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
