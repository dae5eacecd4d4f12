"""What a model reads of a checkpoint, and what is refused when weights and config disagree, from headers alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER
from dflash_trt.models import dflash
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.sharding import REPLICATED, Sharding
from dflash_trt.models.weights import CheckpointLoader, Manifest
from dflash_trt.quantization.nvfp4 import NVFP4Tensor
from tests.checkpoint import tiny_gguf
from tests.conftest import QUANTIZED, Engines
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
        def tensor(self, name: str, shape: tuple[int, ...], sharding: Sharding = REPLICATED) -> None:
            read[name] = shape

        integers = tensor

        def linear(
            self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
        ) -> None:
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


UP = "model.layers.0.mlp.up_proj"
KEY = "model.layers.0.self_attn.k_proj"
VALUES = [f"model.layers.{layer}.self_attn.v_proj" for layer in (0, 1)]
E4M3 = torch.float8_e4m3fn
NO_CONFIG = (
    "a quantized weight's, and the checkpoint does not say how it is quantized; it lacks hf_quant_config.json, or a "
    "quantization_config in its config.json"
)
NO_PLACE = "has no place in the model that the config describes"
NEEDED = "a scalar that the config's quantization needs"
UNREACHED = "a linear that no calibration token reached has none; calibrate with more text"


def quantized_copy(llms: Engines, name: str, directory: Path) -> Path:
    """ModelOpt's export of a target, to be changed."""
    checkpoint = llms[name].engine.path.parent / "target"
    return Path(shutil.copytree(checkpoint, directory))


def requantize(directory: Path, **changes: Any) -> None:
    """Change what config.json says of the quantization."""
    config = json.loads((directory / "config.json").read_text())
    quantization = TargetConfig.from_pretrained(directory).quantization
    assert quantization is not None
    config["quantization_config"] = replace(quantization, **changes).to_quantization_config()
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("engine", QUANTIZED)
def test_reads_all_of_quantized_checkpoints(llms: Engines, engine: str) -> None:
    root = llms[engine].engine.path.parent
    for manifest in (target_of(root / "target"), drafter_of(root / "drafter")):
        weights = manifest.weights
        read = manifest.floats | manifest.quantized | manifest.scales
        assert {name: weights.shape(name) for name in weights.names()} == read
        assert {weights.dtype(name) for name in manifest.floats | manifest.scales} == {torch.float32}
        assert {weights.dtype(name) for name in manifest.quantized} <= {torch.uint8, E4M3}
        assert all(weights.shape(name) == () for name in manifest.scales)


def test_a_scale_may_be_a_vector_of_one(llms: Engines, tmp_path: Path) -> None:
    directory = quantized_copy(llms, "NVFP4", tmp_path / "copy")
    scalars = {name: t.reshape(1) for name, t in load_file(directory / FILE).items() if t.ndim == 0}
    rewrite(directory, **scalars)
    assert target_of(directory).scales == dict.fromkeys(scalars, (1,))
    linear = CheckpointLoader(open_target(directory).weights, lambda tensor: tensor).linear(UP, 80, 48)
    assert isinstance(linear.weight, NVFP4Tensor) and linear.input_scale is not None
    assert linear.weight.weight_scale_2.shape == linear.input_scale.shape == ()


@pytest.mark.parametrize(
    ("engine", "tensor", "value", "message"),
    [
        ("NVFP4", f"{UP}.weight", torch.ones(80, 48).to(E4M3), f"has type float8_e4m3fn; the config says that {UP} is NVFP4, which is uint8"),
        ("NVFP4", f"{UP}.weight", torch.ones(80, 48).bfloat16(), f"has type bfloat16; the config says that {UP} is NVFP4, which is uint8"),
        ("FP8", f"{UP}.weight", torch.ones(80, 24).byte(), f"has type uint8; the config says that {UP} is FP8, which is float8_e4m3fn"),
        ("NVFP4", "lm_head.weight", torch.ones(97, 24).byte(), "has type uint8, a quantized weight's; the config leaves lm_head unquantized"),
        ("FP8", "lm_head.weight", torch.ones(97, 48).to(E4M3), "has type float8_e4m3fn, a quantized weight's; the config leaves lm_head unquantized"),
        ("NVFP4", f"{UP}.weight_scale", torch.ones(80, 2).to(E4M3), "has shape [80, 2]; the config makes it [80, 3]"),
        ("NVFP4", f"{UP}.weight_scale", torch.ones(40, 3).to(E4M3), "has shape [40, 3]; the config makes it [80, 3]"),
        ("NVFP4", f"{UP}.weight_scale", torch.ones(80, 3), "has type float32; it must be float8_e4m3fn"),
        ("NVFP4", f"{UP}.weight", torch.ones(80, 48).byte(), "has shape [80, 48]; the config makes it [80, 24]"),
        ("FP8", f"{UP}.weight_scale", torch.ones(80), "has shape [80]; the config makes it []"),
        ("FP8", f"{UP}.weight_scale", torch.tensor(1.0).bfloat16(), "has type bfloat16; it must be float32"),
        ("FP8 caches", f"{UP}.input_scale", torch.tensor(1.0), f"{NO_PLACE}, which quantizes no activations of this layer"),
        ("FP8", f"{KEY}.k_scale", torch.tensor(1.0), f"{NO_PLACE}, which has no kv_cache_quant_algo"),
    ],
)  # fmt: skip
def test_refuses_a_tensor_that_the_quantization_does_not_make(
    llms: Engines, tmp_path: Path, engine: str, tensor: str, value: torch.Tensor, message: str
) -> None:
    directory = quantized_copy(llms, engine, tmp_path / "copy")
    rewrite(directory, **{tensor: value})
    assert refusal(target_of, directory) == f"{directory}/{FILE}: tensor {tensor} {message}"


@pytest.mark.parametrize(
    ("engine", "tensor", "message"),
    [
        ("NVFP4", f"{UP}.weight", ", of shape [80, 24]"),
        ("NVFP4", f"{UP}.weight_scale", ", of shape [80, 3]"),
        ("NVFP4", f"{UP}.weight_scale_2", f", {NEEDED}"),
        ("FP8", f"{UP}.weight_scale", f", {NEEDED}"),
        ("FP8", f"{UP}.input_scale", f", {NEEDED}: {UNREACHED}"),
        ("NVFP4", f"{UP}.input_scale", f", {NEEDED}: {UNREACHED}"),
        ("FP8 caches", f"{KEY}.k_scale", f", {NEEDED}"),
        ("FP8 caches", f"{VALUES[1]}.v_scale", f", {NEEDED}"),
    ],
)
def test_refuses_a_quantized_layer_that_lacks_a_part(
    llms: Engines, tmp_path: Path, engine: str, tensor: str, message: str
) -> None:
    directory = quantized_copy(llms, engine, tmp_path / "copy")
    rewrite(directory, **{tensor: None})
    assert refusal(target_of, directory) == f"{directory}: lacks the tensor {tensor}{message}"


@pytest.mark.parametrize(
    ("engine", "changes", "message"),
    [
        ("NVFP4", {"exclude_modules": ("lm_head", "*.mlp.*")}, "gate_proj.weight has type uint8, a quantized weight's; the config leaves"),
        ("NVFP4", {"exclude_modules": ()}, "tensor lm_head.weight has type float32; the config says that lm_head is NVFP4"),
        ("NVFP4", {"quant_algo": "FP8"}, "q_proj.weight has type uint8; the config says that model.layers.0.self_attn.q_proj is FP8"),
        ("NVFP4", {"quant_algo": "W4A16_NVFP4"}, f"input_scale {NO_PLACE}, which quantizes no activations"),
        ("FP8 caches", {"quant_algo": "NVFP4"}, f"q_proj.input_scale, {NEEDED}: {UNREACHED}"),
        ("FP8 caches", {"kv_cache_quant_algo": None}, f"k_proj.k_scale {NO_PLACE}, which has no kv_cache_quant_algo, the first of 4 such"),
        ("FP8", {"kv_cache_quant_algo": "FP8"}, f"lacks the tensor {KEY}.k_scale, {NEEDED}"),
        ("FP8", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "q_proj.weight has type float8_e4m3fn, a quantized weight's; the config leaves"),
    ],
)  # fmt: skip
def test_refuses_a_quantization_config_that_is_not_true(
    llms: Engines, tmp_path: Path, engine: str, changes: dict[str, Any], message: str
) -> None:
    directory = quantized_copy(llms, engine, tmp_path / "copy")
    requantize(directory, **changes)
    assert message in refusal(target_of, directory)


@pytest.mark.parametrize(("engine", "dtype"), [("NVFP4", "uint8"), ("FP8", "float8_e4m3fn")])
def test_refuses_quantized_weights_without_a_config(llms: Engines, tmp_path: Path, engine: str, dtype: str) -> None:
    directory = quantized_copy(llms, engine, tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    assert target_of(directory).quantized  # hf_quant_config.json says the same
    (directory / "hf_quant_config.json").unlink()
    query = "model.layers.0.self_attn.q_proj.weight"
    assert refusal(target_of, directory) == f"{directory}/{FILE}: tensor {query} has type {dtype}, {NO_CONFIG}"


def test_refuses_rows_that_do_not_divide_into_blocks(tmp_path: Path) -> None:
    random_target(tmp_path, hidden_size=40)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = QuantizationConfig("NVFP4", None, ("lm_head",)).to_quantization_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    query = "model.layers.0.self_attn.q_proj"
    rewrite(tmp_path, **{f"{query}.weight": torch.ones(64, 20, dtype=torch.uint8)})
    assert refusal(target_of, tmp_path) == (
        f"{tmp_path}/{FILE}: tensor {query}.weight has type uint8 and 40 inputs, no multiple of the 16 that share a "
        f"scale in NVFP4; the config must exclude {query}"
    )
