"""A user's mistake: exit status 2, one line that says what and where, nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.invoke import Result, invoke
from tests.conftest import Engines
from tests.tiny_models import random_drafter, random_target


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    random_drafter(root / "drafter", random_target(root / "target", max_position_embeddings=4096))
    return root


@pytest.fixture
def pair(pristine: Path, tmp_path: Path) -> Path:
    """A directory with target/ and drafter/ that a test may spoil."""
    shutil.copytree(pristine, tmp_path / "pair")
    return tmp_path / "pair"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path.write_text(json.dumps(content))


def edit_tensor(path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def drop_shard(pair: Path) -> None:
    tensors = load_file(pair / "target/model.safetensors")
    (pair / "target/model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (pair / "target/model.safetensors.index.json").write_text(json.dumps(index))


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[3] = float("nan")
    return tensor


def other_target(pair: Path) -> None:
    edit_json(pair / "drafter/config.json", num_target_layers=36)


WEIGHTS = "target/model.safetensors"
NORM = "model.norm.weight"
CHECKPOINTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no directory": (lambda p: shutil.rmtree(p / "target"), ("target", "no such file")),
    "truncated weights": (lambda p: truncate(p / WEIGHTS), (WEIGHTS, "bytes")),
    "truncated drafter": (lambda p: truncate(p / "drafter/model.safetensors"), ("drafter/model.safetensors", "bytes")),
    "garbage weights": (lambda p: (p / WEIGHTS).write_bytes(b"hello") and None, (WEIGHTS, "not a safetensors file")),
    "missing shard": (drop_shard, ("model.safetensors.index.json", "model-00001-of-00002.safetensors")),
    "wrong shape": (
        lambda p: edit_tensor(p / WEIGHTS, NORM, lambda t: t[:-1]),
        (WEIGHTS, NORM, "[47]", "[48]"),
    ),
    "wrong dtype": (lambda p: edit_tensor(p / WEIGHTS, NORM, lambda t: t.to(torch.int8)), (WEIGHTS, NORM, "int8")),
    "NaN": (lambda p: edit_tensor(p / WEIGHTS, NORM, with_nan), (WEIGHTS, NORM, "NaN")),
    "NaN in the drafter": (
        lambda p: edit_tensor(p / "drafter/model.safetensors", "fc.weight", with_nan),
        ("drafter/model.safetensors", "fc.weight", "NaN"),
    ),
    "config without a key": (
        lambda p: edit_json(p / "target/config.json", hidden_size=None),
        ("target/config.json", "hidden_size", "required"),
    ),
    "drafter config without a key": (
        lambda p: edit_json(p / "drafter/config.json", block_size=None),
        ("drafter/config.json", "block_size", "required"),
    ),
    "config that is no JSON": (
        lambda p: (p / "target/config.json").write_text("{") and None,
        ("target/config.json", "not JSON"),
    ),
    "unsupported model": (
        lambda p: edit_json(p / "target/config.json", architectures=["GPT2LMHeadModel"]),
        ("target/config.json", "GPT2LMHeadModel", "LlamaForCausalLM"),
    ),
    "drafter of another target": (
        other_target,
        ("drafter/config.json", "num_target_layers is 36", "num_hidden_layers", "4"),
    ),
    "no tokenizer": (lambda p: (p / "target/tokenizer.json").unlink(), ("target/tokenizer.json",)),
}


def check(result: Result, fragments: tuple[str, ...]) -> None:
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.count("\n") == 1 and result.err.startswith("dflash-trt: ")
    for fragment in fragments:
        assert fragment in result.err


@pytest.mark.parametrize("mistake", CHECKPOINTS)
def test_build_refuses_checkpoint(pair: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    spoil, fragments = CHECKPOINTS[mistake]
    spoil(pair)
    before = sorted(pair.parent.iterdir())
    result = invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair.parent / "engine")
    check(result, fragments)
    assert sorted(pair.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--dtype", "int3"], ("--dtype", "int3", "float32")),
        (["--max_batch_size", "0"], ("max_batch_size is 0", "1 or more")),
        (["--max_batch_size", "many"], ("--max_batch_size", "many")),
        (["--max_seq_len", "9999"], ("max_seq_len is 9999", "4096")),
        (["--max_num_tokens", "-1"], ("max_num_tokens is -1",)),
        (["--backend", "cuda"], ("--backend", "cuda", "torch")),
        (["--quick"], ("--quick",)),
        (["--target_dir", "t"], ("--checkpoint_dir", "--target_dir")),
    ],
)
def test_build_refuses_options(
    pair: Path, capsys: pytest.CaptureFixture[str], options: list[str], fragments: tuple[str, ...]
) -> None:
    engine = pair.parent / "engine"
    check(invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", engine, *options), fragments)
    assert not engine.exists()


def test_build_refuses_overflow(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensor(pair / WEIGHTS, NORM, lambda tensor: tensor * 1e6)
    result = invoke(
        capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair.parent / "engine", "--dtype", "float16"
    )
    check(result, (WEIGHTS, NORM, "float16", "bfloat16"))


@pytest.mark.parametrize("where", ["file/engine", "/proc/engine"])
def test_build_refuses_unwritable_output(pair: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    (pair / "file").touch()
    check(invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair / where), (where, "cannot be written"))


def test_build_leaves_other_directories_alone(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair / "target")
    check(result, ("target", "no engine directory"))
    assert (pair / "target/model.safetensors").exists()


RUNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "empty prompt": (["--prompt", "", "--raw_prompt"], ("prompt 0", "empty")),
    "long prompt": (["--prompt", "x" * 128, "--raw_prompt"], ("prompt 0", "128", "max_seq_len")),
    "second prompt": (["--prompt", "x", "--prompt", "x" * 300, "--raw_prompt"], ("prompt 1", "300", "128")),
    "temperature": (["--prompt", "x", "--temperature", "-1"], ("temperature", "-1")),
    "top_p": (["--prompt", "x", "--top_p", "0"], ("top_p", "0")),
    "max_output_len": (["--prompt", "x", "--max_output_len", "0"], ("max_tokens is 0",)),
    "verify_window": (["--prompt", "x", "--verify_window", "5"], ("verify_window is 5", "4")),
    "exclusive": (
        ["--prompt", "x", "--verify_window", "2", "--no_speculation"],
        ("--no_speculation", "--verify_window"),
    ),
    "device": (["--prompt", "x", "--device", "quantum"], ("quantum", "cpu")),
    "absent GPU": (["--prompt", "x", "--device", "cuda:99"], ("cuda:99",)),
    "no prompt": ([], ("--prompt",)),
}


@pytest.mark.parametrize("mistake", RUNS)
def test_run_refuses(llms: Engines, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    options, fragments = RUNS[mistake]
    check(invoke(capsys, "run", "--engine_dir", llms["llama"].engine.path, *options), fragments)


@pytest.fixture
def engine(llms: Engines, tmp_path: Path) -> Path:
    shutil.copytree(llms["llama"].engine.path, tmp_path / "engine")
    return tmp_path / "engine"


ENGINES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "another version": (lambda e: edit_json(e / "config.json", version="0.0.9"), ("config.json", "0.0.9", "build")),
    "damaged config": (
        lambda e: edit_json(e / "config.json", build_config={"dtype": "float64", "max_batch_size": "some"}),
        ("config.json", "build_config", "some"),
    ),
    "not an engine": (lambda e: (e / "config.json").write_text("{}") and None, ("config.json", "build")),
    "no config": (lambda e: (e / "config.json").unlink(), ("config.json",)),
    "no weights": (lambda e: (e / "target/rank0.safetensors").unlink(), ("target/rank0.safetensors",)),
    "truncated": (lambda e: truncate(e / "drafter/rank0.safetensors"), ("drafter/rank0.safetensors", "bytes")),
    "no tokenizer": (lambda e: (e / "tokenizer.json").unlink(), ("tokenizer",)),
}


@pytest.mark.parametrize("mistake", ENGINES)
def test_run_refuses_engine(engine: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    spoil, fragments = ENGINES[mistake]
    spoil(engine)
    check(invoke(capsys, "run", "--engine_dir", engine, "--prompt", "x"), fragments)


def test_inspect_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(invoke(capsys, "inspect", tmp_path / "nowhere"), ("nowhere", "no such file"))
    check(invoke(capsys, "inspect", tmp_path), (str(tmp_path),))


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    check(invoke(capsys, "frobnicate"), ("frobnicate",))
