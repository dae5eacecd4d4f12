"""What a model reads of a checkpoint, and what is refused when weights and config disagree, from headers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER
from dflash_trt.models import dflash
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest
from tests.checkpoint import tiny_gguf
from tests.models.test_dflash import as_speculators
from tests.tiny_models import random_drafter, random_target

FILE = "model.safetensors"
FLOATS = "float64, float32, bfloat16 or float16"


def target_of(directory: Path) -> Manifest:
    return target_manifest(open_target(directory))


def drafter_of(directory: Path) -> Manifest:
    return drafter_manifest(open_drafter(directory))


def refusal(manifest_of: Callable[[Path], Manifest], directory: Path) -> str:
    with pytest.raises(UserError) as error:
        manifest_of(directory)
    return str(error.value)


def z_lab(directory: Path, **overrides: Any) -> Path:
    """A drafter in the authors' format, for a target of 97 tokens that is left beside it."""
    target = random_target(directory / "target")
    random_drafter(directory / "drafter", target, **overrides)
    return directory / "drafter"


def speculators(directory: Path, tokens: int) -> Path:
    """The same drafter in the speculators format, whose head has the first `tokens` tokens."""
    as_speculators(z_lab(directory), directory / "speculators", list(range(tokens)), torch.ones(tokens, 48))
    return directory / "speculators"


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, torch.Tensor] = load_file(directory / FILE)
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, directory / FILE)


def shapes(directory: Path, *without: str) -> dict[str, tuple[int, ...]]:
    tensors = load_file(directory / FILE)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in without}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_reads_all_that_transformers_saves(tmp_path: Path, family: str, bias: bool, tied: bool) -> None:
    biases = {"attention_bias": bias, **({"mlp_bias": bias} if family == "llama" else {})}
    random_target(tmp_path, family, tie_word_embeddings=tied, **biases)
    manifest = target_of(tmp_path)
    assert manifest.floats == shapes(tmp_path) and manifest.others == {}
    assert ("lm_head.weight" in manifest.floats) is not tied
    assert any(name.endswith(".bias") for name in manifest.floats) is bias


@pytest.mark.parametrize("bias", [False, True])
def test_reads_all_that_the_authors_save(tmp_path: Path, bias: bool) -> None:
    directory = z_lab(tmp_path, attention_bias=bias)
    manifest = drafter_of(directory)
    assert manifest.floats == shapes(directory) and manifest.others == {}


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_reads_all_of_a_gguf_file(tmp_path: Path, architecture: str, head: bool) -> None:
    extra = {"output.weight": tiny_gguf.tensors()["token_embd.weight"]} if head else {}
    target = open_target(tiny_gguf.write(tmp_path / "m.gguf", architecture, extra=extra))
    assert target_manifest(target).floats.keys() == set(target.weights.names())


def test_reads_all_of_the_example() -> None:
    assert drafter_of(DRAFTER).floats == shapes(DRAFTER)


def test_reads_what_the_drafter_of_qwen3_8b_holds(tmp_path: Path) -> None:
    """The published checkpoint has 58 tensors and 1.0486 billion parameters."""
    config = DrafterConfig.from_pretrained(z_lab(tmp_path))
    published = replace(
        config,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 9, 17, 25, 33),
    )
    read: dict[str, tuple[int, ...]] = {}

    class Listed:
        def tensor(self, name: str, shape: tuple[int, ...]) -> None:
            read[name] = shape

        integers = tensor

        def linear(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> None:
            assert not bias
            read[f"{name}.weight"] = (out_features, in_features)

        def ignore(self, name: str) -> None: ...

    dflash.load(Listed(), published)
    assert len(read) == 58
    assert round(sum(map(math.prod, read.values())) / 1e9, 4) == 1.0486
    assert read["fc.weight"] == (4096, 20480)
    assert read["layers.0.self_attn.k_proj.weight"] == (1024, 4096)
    assert read["layers.4.mlp.down_proj.weight"] == (4096, 12288)


def test_reads_the_head_of_a_reduced_vocabulary(tmp_path: Path) -> None:
    directory = speculators(tmp_path, tokens=40)
    manifest = drafter_of(directory)
    assert manifest.floats == shapes(directory, "d2t", "t2d")
    assert manifest.floats["lm_head.weight"] == (40, 48) and manifest.others == {"d2t": (40,)}
    rewrite(directory, **{"embed_tokens.weight": torch.ones(97, 48), "verifier_norm.weight": torch.ones(48)})
    again = drafter_of(directory)
    assert (again.floats, again.others) == (manifest.floats, manifest.others)


@pytest.mark.parametrize("stored", [False, True])
def test_leaves_the_head_of_a_full_vocabulary_to_the_target(tmp_path: Path, stored: bool) -> None:
    directory = speculators(tmp_path, tokens=97)
    if not stored:
        rewrite(directory, **{"lm_head.weight": None, "d2t": None, "t2d": None})
    manifest = drafter_of(directory)
    assert manifest.floats == shapes(tmp_path / "drafter") and manifest.others == {}


def test_lets_redundant_tensors_be(tmp_path: Path) -> None:
    random_target(tmp_path, tie_word_embeddings=True)
    expected = target_of(tmp_path).floats
    rewrite(
        tmp_path,
        **{"lm_head.weight": torch.zeros(97, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    )
    assert target_of(tmp_path).floats == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks the tensor model.norm.weight, of shape [48]"),
        ({"lm_head.weight": None}, "lacks the tensor lm_head.weight, of shape [97, 48]"),
        (
            {"model.norm.weight": torch.ones(47)},
            f"{FILE}: tensor model.norm.weight has shape [47]; the config makes it [48]",
        ),
        (
            {"model.norm.weight": torch.ones(48, dtype=torch.int8)},
            f"{FILE}: tensor model.norm.weight has type int8; it must be {FLOATS}",
        ),
        (
            {"model.norm.weight": torch.ones(48).to(torch.float8_e4m3fn)},
            f"{FILE}: tensor model.norm.weight has type float8_e4m3fn; it must be {FLOATS}",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
            f"{FILE}: tensor model.layers.0.mlp.up_proj.weight_scale has no place in the model that the config describes",
        ),
        (
            {f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(64) for layer in (3, 2)},
            f"{FILE}: tensor model.layers.2.self_attn.q_proj.bias has no place in the model that the config describes, "
            "the first of 2 such",
        ),
    ],
)
def test_refuses_weights_of_another_target(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    random_target(tmp_path)
    rewrite(tmp_path, **change)
    assert refusal(target_of, tmp_path) in (f"{tmp_path}: {message}", f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "lacks the tensor fc.weight, of shape [48, 96]"),
        ({"fc.weight": torch.ones(48, 48)}, "tensor fc.weight has shape [48, 48]; the config makes it [48, 96]"),
        ({"layers.3.mlp.up_proj.weight": torch.ones(4, 4)}, "layers.3.mlp.up_proj.weight has no place"),
        ({"layers.0.self_attn.attention_sink_bias": torch.ones(4)}, "attention_sink_bias has no place"),
        ({"layers.0.self_attn.q_proj.bias": torch.ones(64)}, "layers.0.self_attn.q_proj.bias has no place"),
        ({"lm_head.weight": torch.ones(97, 48)}, "lm_head.weight has no place"),
        ({"embed_tokens.weight": torch.ones(97, 48)}, "embed_tokens.weight has no place"),
    ],
)
def test_refuses_weights_of_another_drafter(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    directory = z_lab(tmp_path)
    rewrite(directory, **change)
    refused = refusal(drafter_of, directory)
    assert refused.startswith(f"{directory}") and message in refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "lacks the tensor d2t, of shape [40]"),
        ({"lm_head.weight": None}, "lacks the tensor lm_head.weight, of shape [40, 48]"),
        ({"d2t": torch.arange(39)}, f"{FILE}: tensor d2t has shape [39]; the config makes it [40]"),
        ({"d2t": torch.zeros(40)}, f"{FILE}: tensor d2t has type float32; it must be int64 or int32"),
        ({"t2d_extra": torch.ones(1)}, f"{FILE}: tensor t2d_extra has no place in the model that the config describes"),
    ],
)
def test_refuses_weights_of_another_speculator(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    directory = speculators(tmp_path, tokens=40)
    rewrite(directory, **change)
    assert refusal(drafter_of, directory) in (f"{directory}: {message}", f"{directory}/{message}")
