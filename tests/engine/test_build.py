"""Building engine directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import Build, build_engine, plan_build
from dflash_trt.engine.config import BuildConfig, checkpoint_dtype
from dflash_trt.engine.directory import open_engine
from dflash_trt.engine.weights import open_weights
from dflash_trt.errors import UserError
from dflash_trt.quantization.nvfp4 import quantize_nvfp4
from tests.conftest import QUANTIZED, Engines
from tests.models.test_dflash import as_speculators
from tests.tiny_models import random_drafter, random_target

CONFIG = BuildConfig(dtype="float32", max_batch_size=2, max_seq_len=64, max_num_tokens=16)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target", "qwen3"))
    return tmp_path


def build(pair: Path, output: Path, config: BuildConfig = CONFIG) -> Path:
    return build_engine(open_target(pair / "target"), open_drafter(pair / "drafter"), config, output).path


def plan(pair: Path, drafter: str = "drafter") -> Build:
    return plan_build(open_target(pair / "target"), open_drafter(pair / drafter), CONFIG, pair / "engine")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_weights_are_the_checkpoints(pair: Path, dtype: str) -> None:
    engine = open_engine(build(pair, pair / "engine", BuildConfig(dtype=dtype, max_seq_len=64)))  # type: ignore[arg-type]
    for source, built in (("target", engine.target_weights), ("drafter", engine.drafter_weights)):
        expected, actual = load_file(pair / source / "model.safetensors"), load_file(built)
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor.to(getattr(torch, dtype)))


def test_directory_is_complete(pair: Path) -> None:
    """With nothing but the engine directory the tokenizer encodes and every setting is there."""
    ids = open_engine(build(pair, pair / "engine")).tokenizer().encode("abc")
    for source in ("target", "drafter"):
        (pair / source).rename(pair / f"moved-{source}")
    engine = open_engine(pair / "engine")
    assert engine.tokenizer().encode("abc") == ids
    assert engine.config.build_config == CONFIG
    assert engine.config.pretrained_config == open_target(pair / "moved-target").config
    assert engine.config.speculative_config == open_drafter(pair / "moved-drafter").config
    assert engine.config.builder.backend == "torch" and engine.config.builder.version == torch.__version__


def test_a_drafters_example_prompts_are_among_it(pair: Path) -> None:
    (pair / "drafter/example_prompts.txt").write_bytes("Où?\n".encode())
    for _ in range(2):  # an engine that has them can be replaced
        build(pair, pair / "engine")
    assert (pair / "engine/example_prompts.txt").read_bytes() == "Où?\n".encode()


def test_plan_is_what_is_written(pair: Path) -> None:
    before = sorted(pair.iterdir())
    planned = plan(pair)
    assert sorted(pair.iterdir()) == before
    engine = planned.write()
    assert open_engine(pair / "engine") == engine and engine.config == planned.config
    for specs, file in ((planned.target.specs, engine.target_weights), (planned.drafter.specs, engine.drafter_weights)):
        assert {spec.name: spec.shape for spec in specs} == {n: tuple(t.shape) for n, t in load_file(file).items()}


def test_progress_adds_up(pair: Path) -> None:
    sizes: list[int] = []
    planned = plan(pair)
    planned.write(sizes.append)
    assert sum(sizes) == planned.weight_bytes


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing_and_spoils_nothing(pair: Path, failure: type[BaseException]) -> None:
    build(pair, pair / "engine")
    before = {path: path.read_bytes() for path in pair.rglob("*") if path.is_file()}

    def fail(size: int) -> None:
        raise failure

    for output in ("engine", "new"):
        with pytest.raises(failure):
            build_engine(open_target(pair / "target"), open_drafter(pair / "drafter"), CONFIG, pair / output, fail)
    assert {path: path.read_bytes() for path in pair.rglob("*") if path.is_file()} == before
    assert not (pair / "new").exists()


def test_an_engine_is_replaced_whole(pair: Path) -> None:
    build(pair, pair / "engine")
    (pair / "engine" / "target" / "stale").touch()
    build(pair, pair / "engine", BuildConfig(dtype="bfloat16", max_seq_len=64))
    assert open_engine(pair / "engine").config.build_config.dtype == "bfloat16"
    assert not (pair / "engine" / "target" / "stale").exists()


def test_type_of_a_checkpoint(pair: Path) -> None:
    weights = open_target(pair / "target").weights
    assert checkpoint_dtype(weights) == "float32"


def test_refuses_more_positions_than_the_target_has(pair: Path) -> None:
    with pytest.raises(UserError, match="max_seq_len is 513, above max_position_embeddings 512"):
        build(pair, pair / "engine", BuildConfig(dtype="float32", max_seq_len=513))


def test_a_tied_head_may_be_stored_but_must_be_the_embedding(tmp_path: Path) -> None:
    """Otherwise config.json lies: transformers would untie them."""
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target", tie_word_embeddings=True))
    file = tmp_path / "target/model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    engine = open_engine(build(tmp_path, tmp_path / "engine"))
    assert "lm_head.weight" not in load_file(engine.target_weights)

    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(UserError, match=r"lm_head\.weight.*model\.embed_tokens\.weight.*tie_word_embeddings"):
        plan(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("tied", [False, True])
def test_a_drafter_may_store_copies_of_its_target_but_no_others(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    """They are left out, so what differs would silently be lost; a copy may have a narrower type."""
    target = random_target(tmp_path / "target", tie_word_embeddings=tied)
    random_drafter(tmp_path / "drafter", target)
    head, embedding = (module.weight.detach().clone() for module in (target.lm_head, target.model.embed_tokens))
    as_speculators(tmp_path / "drafter", tmp_path / "own", list(range(97)), head.to(dtype))
    file = tmp_path / "own/model.safetensors"
    copies = {**load_file(file), "embed_tokens.weight": embedding.to(dtype)}
    save_file(copies, file)
    engine = plan(tmp_path, "own").write()
    assert not {"lm_head.weight", "embed_tokens.weight"} & load_file(engine.drafter_weights).keys()

    for name, original in (
        ("lm_head.weight", "model.embed_tokens.weight" if tied else "lm_head.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
    ):
        others = [copies[name].float() * 2, copies[name][:-1].float()]
        for other in others:
            save_file({**copies, name: other.to(dtype).contiguous()}, file)
            with pytest.raises(UserError) as refusal:
                plan(tmp_path, "own")
            expected = f"{file}: {name} is not a copy of {original} of {tmp_path / 'target/model.safetensors'}, "
            assert str(refusal.value).startswith(expected)


def test_an_input_that_goes_away_is_named(pair: Path) -> None:
    """Not the output: only a reader knows what it could not read."""
    planned = plan(pair)
    (pair / "target/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"target/model\.safetensors: cannot be read"):
        planned.write()
    assert not (pair / "engine").exists()


UP, KEY = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"
E4M3 = torch.float8_e4m3fn


def quantized_copy(llms: Engines, name: str, directory: Path) -> Path:
    """The checkpoints of a quantized engine, to be changed."""
    for part in ("target", "drafter"):
        shutil.copytree(llms[name].engine.path.parent / part, directory / part)
    return directory


def edit(file: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file({**tensors, name: change(tensors[name])}, file, metadata)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_are_copied_as_they_are(llms: Engines, tmp_path: Path, name: str, dtype: str) -> None:
    quantized_copy(llms, name, tmp_path)
    engine = open_engine(build(tmp_path, tmp_path / "engine", BuildConfig(dtype=dtype, max_seq_len=64)))  # type: ignore[arg-type]
    for source, built in (("target", engine.target_weights), ("drafter", engine.drafter_weights)):
        expected, actual = load_file(tmp_path / source / "model.safetensors"), load_file(built)
        assert actual.keys() == expected.keys()
        for tensor, value in expected.items():
            kept = value.dtype in (torch.uint8, E4M3) or tensor.endswith(("_scale", "_scale_2"))
            same = value if kept else value.to(getattr(torch, dtype))
            assert actual[tensor].dtype == same.dtype and actual[tensor].shape == same.shape
            assert torch.equal(actual[tensor].reshape(-1).view(torch.uint8), same.reshape(-1).view(torch.uint8))
    assert checkpoint_dtype(open_target(tmp_path / "target").weights) == "float32"


@pytest.mark.parametrize("value", [0.0, -0.5, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("NVFP4", f"{UP}.input_scale"),
        ("NVFP4", f"{UP}.weight_scale_2"),
        ("FP8", f"{UP}.weight_scale"),
        ("FP8 caches", f"{KEY}.k_scale"),
        ("FP8 caches", "model.layers.1.self_attn.v_proj.v_scale"),
    ],
)
def test_refuses_a_scale_that_is_none(llms: Engines, tmp_path: Path, name: str, tensor: str, value: float) -> None:
    """When the build is planned, and again when the engine is loaded."""
    quantized_copy(llms, name, tmp_path)
    file = tmp_path / "target/model.safetensors"
    why = (
        "a linear that no calibration token reached" if tensor.endswith("input_scale") else "the checkpoint is damaged"
    )
    expected = f"{tensor} is {value}, it must be positive and finite: {why}"
    built = build(tmp_path, tmp_path / "good") / "target/rank0.safetensors"
    for damaged in (file, built):
        edit(damaged, tensor, lambda scale: torch.full_like(scale, value))
    with pytest.raises(UserError) as refused:
        plan(tmp_path)
    assert str(refused.value).startswith(f"{file}: {expected}")
    with pytest.raises(UserError) as refused:
        open_weights(open_engine(tmp_path / "good"))
    assert str(refused.value).startswith(f"{built}: {expected}")


@pytest.mark.parametrize(
    ("name", "tensor", "code", "message"),
    [
        ("NVFP4", f"{UP}.weight_scale", 0x00, "2 scales that are zero, negative or NaN"),
        ("NVFP4", f"{UP}.weight_scale", 0x80, "2 scales that are zero, negative or NaN"),
        ("NVFP4", f"{UP}.weight_scale", 0xB8, "2 scales that are zero, negative or NaN"),
        ("NVFP4", f"{UP}.weight_scale", 0x7F, "2 scales that are zero, negative or NaN"),
        ("NVFP4", f"{UP}.weight_scale", 0x01, None),
        ("NVFP4", f"{UP}.weight_scale", 0x7E, None),
        ("NVFP4", f"{UP}.weight", 0xFF, None),
        ("FP8", f"{UP}.weight", 0x7F, "2 values that are NaN"),
        ("FP8", f"{UP}.weight", 0xFF, "2 values that are NaN"),
        ("FP8", f"{UP}.weight", 0x00, None),
        ("FP8", f"{UP}.weight", 0xFE, None),
    ],
)
def test_refuses_codes_that_no_quantization_makes(
    llms: Engines, tmp_path: Path, name: str, tensor: str, code: int, message: str | None
) -> None:
    quantized_copy(llms, name, tmp_path)
    file = tmp_path / "target/model.safetensors"

    def damage(packed: torch.Tensor) -> torch.Tensor:
        packed.view(torch.uint8)[3, 1:3] = code
        return packed

    edit(file, tensor, damage)
    planned = plan(tmp_path)
    if message is None:
        planned.write()
        return
    with pytest.raises(UserError) as refused:
        planned.write()
    assert str(refused.value) == f"{file}: {tensor} holds {message}; the checkpoint is damaged"
    assert not (tmp_path / "engine").exists()


def test_a_drafter_may_store_the_head_of_a_quantized_target(llms: Engines, tmp_path: Path) -> None:
    """Which ModelOpt leaves unquantized; a quantized one is no longer what the drafter was trained with."""
    quantized_copy(llms, "NVFP4", tmp_path)
    target = tmp_path / "target/model.safetensors"
    head = load_file(target)["lm_head.weight"]
    as_speculators(tmp_path / "drafter", tmp_path / "own", list(range(97)), head.clone())
    plan(tmp_path, "own")

    packed = quantize_nvfp4(head, "lm_head.weight")._asdict()
    quantized = {f"lm_head.{field}": tensor for field, tensor in packed.items()}
    save_file({**load_file(target), **quantized, "lm_head.input_scale": torch.tensor(0.01)}, target)
    config = json.loads((tmp_path / "target/config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="give the target that the drafter was made for, unquantized"):
        plan(tmp_path, "own")
    plan(tmp_path)
