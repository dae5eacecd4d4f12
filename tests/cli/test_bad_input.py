"""A user's mistake: exit status 2, one line that says what and where, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.runtime import load
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


def unreadable(path: Path) -> None:
    """The system refuses to read its beginning, to anyone."""
    path.unlink(missing_ok=True)
    path.symlink_to("/proc/self/mem")


def unreadable_gguf(pair: Path) -> None:
    (pair / "target/config.json").unlink()
    unreadable(pair / "target/m.gguf")


def other_head(pair: Path) -> None:
    edit_json(pair / "target/config.json", tie_word_embeddings=True)


def other_target(pair: Path) -> None:
    edit_json(pair / "drafter/config.json", num_target_layers=36)


def pipe(path: Path) -> None:
    """Which waits for ever when it is opened."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def pipes_and_links() -> dict[str, tuple[Callable[[Path], None], tuple[str, ...]]]:
    """Every file that a build reads, as a pipe and as a link that leads nowhere."""
    files = (
        *("config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    )

    def link(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to("blobs/gone")

    names = [f"target/{name}" for name in files] + ["drafter/config.json", "drafter/model.safetensors"]
    pipes = {f"{name} as a pipe": (lambda p, n=name: pipe(p / n), (f"{name}: is a pipe",)) for name in names}
    links = {f"{name} as a link": (lambda p, n=name: link(p / n), (f"{name}: is a link to blobs",)) for name in names}
    return {**pipes, **links}


def absurd(part: str, **changes: Any) -> tuple[Callable[[Path], None], tuple[str, ...]]:
    """An edit of a config that is refused by the name of its first key."""
    return (lambda p: edit_json(p / part / "config.json", **changes)), (f"{part}/config.json", next(iter(changes)))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
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
    "damaged tokenizer": (lambda p: edit_json(p / "target/tokenizer.json", model={}), ("target: its tokenizer",)),
    "garbage tokenizer": (
        lambda p: (p / "target/tokenizer.json").write_text("[]") and None,
        ("target: its tokenizer",),
    ),
    "unreadable tokenizer": (
        lambda p: unreadable(p / "target/tokenizer.json"),
        ("target/tokenizer.json: cannot be read",),
    ),
    "unreadable weights": (lambda p: unreadable(p / WEIGHTS), (f"{WEIGHTS}: cannot be read",)),
    "unreadable GGUF file": (
        unreadable_gguf,
        ("target/m.gguf: cannot be read",),
    ),
    "quantized target": (
        lambda p: edit_json(p / "target/config.json", quantization_config={"quant_method": "fp8"}),
        ("target/config.json: quantization_config.quant_method", '"fp8"', "dflash-trt convert"),
    ),
    "quantized drafter": (
        lambda p: edit_json(p / "drafter/config.json", quantization_config={"bits": 4}),
        ("drafter/config.json: quantization_config.quant_method", "required"),
    ),
    **pipes_and_links(),
    "integer of 400 digits": absurd("target", hidden_size=10**400),
    "layers without end": absurd("drafter", num_hidden_layers=10**9),
    "block without end": absurd("drafter", block_size=10**18),
    "context without end": absurd("target", max_position_embeddings=10**18),
    "begin outside the vocabulary": absurd("target", bos_token_id=10**6),
    "YaRN without a band": absurd("target", rope_parameters=YARN | {"beta_fast": 1e308, "beta_slow": 1e308}),
    "YaRN without wavelengths": absurd("target", rope_parameters=YARN | {"rope_theta": 1.0}),
    "YaRN beyond float16": absurd("target", rope_parameters=YARN | {"attention_factor": 1e5}),
    "nested config": (
        lambda p: (p / "target/config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000) and None,
        ("target/config.json", "nested"),
    ),
    "tokenizer with an id beyond all": (
        lambda p: edit_json(
            p / "target/tokenizer.json",
            model=json.loads((p / "target/tokenizer.json").read_text())["model"] | {"vocab": {"a": 0, "b": 10**9}},
        ),
        ("target: its tokenizer cannot be loaded", "token id 1000000000"),
    ),
    "tokenizer with a number as text": (
        lambda p: edit_json(p / "target/tokenizer_config.json", model_max_length={}),
        ("target: its tokenizer cannot be loaded",),
    ),
    "untied head": (other_head, (WEIGHTS, "lm_head.weight", "tie_word_embeddings")),
}
ONLY_CONVERTING_SHOWS = {"NaN", "NaN in the drafter"}


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
    if mistake not in ONLY_CONVERTING_SHOWS:
        dry = invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair.parent / "engine", "--dry_run")
        assert dry == result


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--dtype", "int3"], ("--dtype", "int3", "float32")),
        (["--max_batch_size", "0"], ("--max_batch_size", "0", "x>=1")),
        (["--max_batch_size", "many"], ("--max_batch_size", "many")),
        (["--max_seq_len", "9999"], ("max_seq_len is 9999", "4096")),
        (["--max_seq_len", "1"], ("--max_seq_len", "1", "x>=2")),
        (["--max_num_tokens", "-1"], ("--max_num_tokens", "-1")),
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
    for options in ([], ["--dry_run"]):
        result = invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair / where, *options)
        check(result, (where, "cannot be written"))


def test_build_names_the_input_that_the_system_refuses(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, drafter in (
        ("x" * 300, pair / "drafter"),
        (f"{'x' * 300}.gguf", pair / "drafter"),
        (pair / "target", "x" * 300),
    ):
        result = invoke(
            capsys, "build", "--target_dir", target, "--drafter_dir", drafter, "--output_dir", pair.parent / "engine"
        )
        check(result, ("xxx", "cannot be read", "too long"))


def test_build_leaves_other_directories_alone(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--dry_run"]):
        result = invoke(capsys, "build", "--checkpoint_dir", pair, "--output_dir", pair / "target", *options)
        check(result, ("target", "no engine directory"))
        assert (pair / "target/model.safetensors").exists()


RUNS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "empty prompt": (["--prompt", "", "--raw_prompt"], ("prompt 0", "empty")),
    "long prompt": (["--prompt", "x" * 128, "--raw_prompt"], ("prompt 0", "128", "max_seq_len")),
    "second prompt": (["--prompt", "x", "--prompt", "x" * 300, "--raw_prompt"], ("prompt 1", "300", "128")),
    **{
        option: (["--prompt", "x", f"--{option}", value], (f"'--{option}'", value))
        for option, value in {
            "max_output_len": "0",
            "temperature": "-1.0",
            "top_k": "-2",
            "top_p": "0.0",
            "min_p": "1.5",
            "repetition_penalty": "0.0",
            "presence_penalty": "2.5",
            "frequency_penalty": "-3.0",
            "seed": "-1",
            "n": "0",
            "verify_window": "0",
            "min_tokens": "-1",
            "logprobs": "21",
            "logit_bias": "[1]",
        }.items()
    },
    "verify_window beyond the block": (["--prompt", "x", "--verify_window", "5"], ("verify_window is 5", "4")),
    "bias of no token": (["--prompt", "x", "--logit_bias", '{"x": 1}'], ("'--logit_bias'", "token id")),
    "bias that is none": (["--prompt", "x", "--logit_bias", '{"1": "x"}'], ("'--logit_bias'", "token id")),
    "bias beyond": (["--prompt", "x", "--logit_bias", '{"1": 101}'], ("logit_bias[1] is 101",)),
    "bias beyond the vocabulary": (["--prompt", "x", "--logit_bias", '{"97": 1}'], ("logit_bias[97]", "0 to 96")),
    "least beyond most": (["--prompt", "x", "--min_tokens", "9", "--max_output_len", "8"], ("min_tokens is 9",)),
    "log-probabilities as text": (["--prompt", "x", "--logprobs", "2"], ("--logprobs", "--format json")),
    "two forms": (["--prompt", "x", "--regex", "a", "--json_schema", "{}"], ("--json_schema", "--regex")),
    "no schema": (["--prompt", "x", "--json_schema", "{"], ("structured_outputs.json", "JSON")),
    "absent schema": (["--prompt", "x", "--json_schema", "@nowhere.json"], ("nowhere.json: no such file",)),
    "no expression": (["--prompt", "x", "--regex", "(a"], ("structured_outputs.regex", "unterminated subpattern")),
    "absent grammar": (["--prompt", "x", "--grammar", "nowhere.ebnf"], ("nowhere.ebnf: no such file",)),
    "form past its end": (["--prompt", "x", "--regex", "a", "--ignore_eos"], ("ignore_eos", "structured_outputs")),
    "exclusive": (
        ["--prompt", "x", "--verify_window", "2", "--no_speculation"],
        ("--no_speculation", "--verify_window"),
    ),
    "device": (["--prompt", "x", "--device", "quantum"], ("quantum", "cpu")),
    "absent GPU": (["--prompt", "x", "--device", "cuda:99"], ("cuda:99",)),
    "template arguments": (
        ["--prompt", "x", "--chat_template_kwargs", "[1]"],
        ("--chat_template_kwargs", "[1]", "object"),
    ),
    "damaged template arguments": (
        ["--prompt", "x", "--chat_template_kwargs", "{"],
        ("--chat_template_kwargs", "JSON"),
    ),
    "template of raw prompts": (
        ["--prompt", "x", "--raw_prompt", "--chat_template_kwargs", '{"a": 1}'],
        ("--raw_prompt", "--chat_template_kwargs"),
    ),
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


def edit_inner(engine: Path, part: str, **changes: Any) -> None:
    """Edit an object inside an engine's config; None removes a key."""
    content = json.loads((engine / "config.json").read_text())[part] | changes
    edit_json(engine / "config.json", **{part: {key: value for key, value in content.items() if value is not None}})


TOKEN_BYTES = 2 * (4 + 2) * 2 * 16 * 8
"""Keys and values of four and two layers of two heads of 16, in float64."""
ENGINES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "another version": (lambda e: edit_json(e / "config.json", version="0.0.9"), ("config.json", "0.0.9", "build")),
    "damaged config": (
        lambda e: edit_json(e / "config.json", build_config={"dtype": "float64", "max_batch_size": "some"}),
        ("config.json", "build_config", "some"),
    ),
    "unknown architecture": (
        lambda e: edit_inner(e, "pretrained_config", architecture="GPT2LMHeadModel"),
        ("config.json: pretrained_config.architecture is 'GPT2LMHeadModel'", "LlamaForCausalLM"),
    ),
    "fewer layers than weights": (
        lambda e: edit_inner(e, "pretrained_config", num_hidden_layers=3),
        ("config.json", "num_target_layers", "num_hidden_layers"),
    ),
    "another type than the weights": (
        lambda e: edit_inner(e, "build_config", dtype="float32"),
        ("target/rank0.safetensors", "is float64", "float32"),
    ),
    "taps beyond the target": (
        lambda e: edit_inner(e, "speculative_config", target_layer_ids=[0, 99]),
        ("config.json", "target_layer_ids", "99"),
    ),
    "sizes of no model": (
        lambda e: edit_inner(e, "speculative_config", block_size=10**18),
        ("config.json", "block_size is 1000000000000000000, it must be 1 to 1024"),
    ),
    "no frequencies": (
        lambda e: edit_inner(
            e, "pretrained_config", rope={"kind": "linear", "theta": 1e4, "head_dim": 8, "factor": 1e60}
        ),
        ("config.json", "no frequencies"),
    ),
    "a pipe": (lambda e: pipe(e / "tokenizer.json"), ("tokenizer.json: is a pipe",)),
    "weights that are a pipe": (
        lambda e: pipe(e / "drafter/rank0.safetensors"),
        ("rank0.safetensors: is a pipe",),
    ),
    "no slots": (
        lambda e: edit_inner(e, "build_config", max_batch_size=0),
        ("config.json: max_batch_size is 0, it must be 1 or more",),
    ),
    "a missing field": (
        lambda e: edit_inner(e, "pretrained_config", hidden_size=None),
        ("config.json: pretrained_config.hidden_size is required\n",),
    ),
    "no memory": (
        lambda e: edit_inner(e, "build_config", max_batch_size=10**9),
        (
            f"caches take {10**9 * TOKEN_BYTES * (128 + 4)} bytes",
            "--max_batch_size, now 1000000000",
            "--max_seq_len, now 128",
        ),
    ),
    "a number": (lambda e: (e / "config.json").write_text("3") and None, ("config.json", "no engine's config")),
    "damaged tokenizer": (lambda e: edit_json(e / "tokenizer.json", model={}), ("engine: its tokenizer",)),
    "unreadable weights": (
        lambda e: unreadable(e / "target/rank0.safetensors"),
        ("target/rank0.safetensors: cannot be read",),
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


ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
"""As torch words it."""


@pytest.mark.parametrize(
    "failure", [RuntimeError(ALLOCATOR), RuntimeError("std::bad_alloc"), torch.OutOfMemoryError(), MemoryError()]
)
def test_run_refuses_when_memory_cannot_be_allocated(
    llms: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    engine = llms["llama"].engine

    def fail(*arguments: object, **options: object) -> None:
        raise failure

    for step, fragments in (
        ("torch_executor", (f"caches take {engine.config.cache_bytes} bytes", "--max_batch_size", "--max_seq_len")),
        ("load_rank", ("cpu has no memory for its weights", "--tp_size")),
    ):
        monkeypatch.setattr(load, step, fail)
        result = invoke(capsys, "run", "--engine_dir", engine.path, "--prompt", "x", "--device", "cpu")
        check(result, fragments)


@pytest.mark.parametrize("step", ["torch_executor", "load_rank"])
def test_other_failures_keep_their_message(
    llms: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(load, step, fail)
    path = llms["llama"].engine.path
    result = invoke(capsys, "run", "--engine_dir", path, "--prompt", "x", "--device", "cpu")
    assert result.status == 1 and "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in result.err


@pytest.mark.parametrize(("option", "value"), [("max_output_len", "0"), ("verify_window", "0"), ("verify_window", "9")])
def test_demo_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    result = invoke(capsys, "demo", "--output_dir", tmp_path / "engine", f"--{option}", value)
    check(result, (f"'--{option}'", value))
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("option", ["--json_schema", "--grammar"])
def test_run_refuses_a_pipe(llms: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    pipe(tmp_path / "pipe")
    file = f"@{tmp_path / 'pipe'}" if option == "--json_schema" else tmp_path / "pipe"
    result = invoke(capsys, "run", "--engine_dir", llms["llama"].engine.path, "--prompt", "x", option, file)
    check(result, ("pipe: is a pipe",))


@pytest.mark.parametrize("option", ["--calib_dataset", "--report"])
def test_convert_refuses_a_pipe(pair: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    pipe(pair / "text.txt")
    (pair / "good.txt").write_text("a text")
    calibration = [] if option == "--calib_dataset" else ["--calib_dataset", pair / "good.txt"]
    options = ["--target_dir", pair / "target", "--output_dir", pair / "out", "--qformat", "fp8", *calibration]
    check(invoke(capsys, "convert", *options, option, pair / "text.txt"), ("text.txt: is a pipe",))


def test_inspect_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(invoke(capsys, "inspect", tmp_path / "nowhere"), ("nowhere", "no such file"))
    check(invoke(capsys, "inspect", tmp_path), (str(tmp_path),))
    check(invoke(capsys, "inspect", "x" * 300), ("xxx: cannot be read", "too long"))


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    check(invoke(capsys, "frobnicate"), ("frobnicate",))
