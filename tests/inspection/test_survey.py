"""What the survey counts, and that it finds nothing wrong with what ModelOpt exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.declaration import Declaration, read_declaration
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.inspection.survey import Count, Survey, survey
from tests.conftest import TINY
from tests.exports import Exports, model_of

PRESETS = {"FP8_DEFAULT_CFG": "FP8", "NVFP4_DEFAULT_CFG": "NVFP4", "W4A16_NVFP4_CFG": "NVFP4"}


def surveyed(directory: Path) -> Survey:
    return survey(SafetensorsWeights(directory), read_declaration(directory))


@pytest.mark.parametrize("cache", ["", " kv"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("preset", PRESETS)
def test_counts_what_modelopt_exports(exports: Exports, family: str, preset: str, cache: str) -> None:
    directory = exports[f"{family} {preset}{cache}"]
    result = surveyed(directory)
    assert result.problems == ()
    assert set(result.formats) == {PRESETS[preset], "BF16"}
    tensors = load_file(directory / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    parameters = sum(parameter.numel() for parameter in model_of(family).parameters())
    assert (result.total.parameters, result.total.bytes) == (parameters, size)
    assert result.total.bits_per_parameter == 8 * size / parameters
    plain = [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    unquantized = sum(tensors[name].numel() for name in plain)
    assert result.formats["BF16"] == Count(len(plain), unquantized, 2 * unquantized)
    scalars = sum(tensor.nbytes for tensor in tensors.values() if tensor.ndim == 0)
    bits = 8 if PRESETS[preset] == "FP8" else 4 + 8 / 16
    quantized = result.formats[PRESETS[preset]]
    assert quantized.bytes - scalars == bits / 8 * (parameters - unquantized)
    assert result.quantized == quantized
    assert quantized.modules == sum(
        tensor.dtype in (torch.uint8, torch.float8_e4m3fn) and name.endswith(".weight")
        for name, tensor in tensors.items()
    )


def test_nothing_is_wrong_with_a_cache_whose_scales_are_all_one(exports: Exports) -> None:
    directory = exports["llama FP8_DEFAULT_CFG kv_cast"]
    assert not any(name.endswith("k_scale") for name in SafetensorsWeights(directory).names())
    assert surveyed(directory).problems == ()


def test_excluded_modules_are_those_that_modelopt_left_alone(exports: Exports) -> None:
    result = surveyed(exports["llama NVFP4_MLP_ONLY_CFG"])
    assert result.problems == ()
    attention = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "koqv"]
    assert sorted(result.excluded["model.layers.1.self_attn*"]) == attention
    assert result.excluded["lm_head"] == ("lm_head.weight",)


def test_patterns_name_what_the_config_says_they_name(exports: Exports) -> None:
    directory = exports["llama NVFP4_MLP_ONLY_CFG"]
    quantization = read_declaration(directory).quantization
    assert quantization is not None
    excluded = {weight for weights in surveyed(directory).excluded.values() for weight in weights}
    for name in SafetensorsWeights(directory).names():
        if name.endswith(".weight"):
            assert (quantization.algo_of(name.removesuffix(".weight")) is None) == (name in excluded)


def test_an_unquantized_checkpoint() -> None:
    result = surveyed(TINY / "target")
    tensors = load_file(TINY / "target/model.safetensors")
    parameters = sum(tensor.numel() for tensor in tensors.values())
    assert result.formats == {"FP16": Count(len(tensors), parameters, 2 * parameters)}
    assert result.problems == () and result.quantized == Count(0, 0, 0)


def test_formats_of_others(tmp_path: Path) -> None:
    """By hand: ModelOpt's MXFP4 and MXFP8, blocks of 128 as DeepSeek has them, compressed-tensors, and what AWQ packs."""
    tensors = {
        "mx4.weight": torch.zeros(32, 32, dtype=torch.uint8),
        "mx4.weight_scale": torch.full((32, 2), 127, dtype=torch.uint8),
        "mx8.weight": torch.zeros(32, 64).to(torch.float8_e4m3fn),
        "mx8.weight_scale": torch.full((32, 2), 127, dtype=torch.uint8),
        "blocks.weight": torch.zeros(128, 256).to(torch.float8_e4m3fn),
        "blocks.weight_scale_inv": torch.ones(1, 2),
        "ct.weight_packed": torch.zeros(32, 32, dtype=torch.uint8),
        "ct.weight_scale": torch.ones(32, 4).to(torch.float8_e4m3fn),
        "ct.weight_global_scale": torch.ones(1),
        "experts.up_proj": torch.zeros(2, 32, 32, dtype=torch.uint8),
        "experts.up_proj_weight_scale": torch.ones(2, 32, 4).to(torch.float8_e4m3fn),
        "experts.up_proj_weight_scale_2": torch.ones(2),
        "d2t": torch.arange(8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    unsupported = Declaration(tmp_path, unsupported="several")
    result = survey(SafetensorsWeights(tmp_path), unsupported)
    assert result.formats == {
        "MXFP4": Count(1, 2048, 1024 + 64),
        "MXFP8": Count(1, 2048, 2048 + 64),
        "FP8_BLOCKS": Count(1, 128 * 256, 128 * 256 + 8),
        "NVFP4": Count(2, 2048 + 4096, 1024 + 128 + 4 + 2048 + 256 + 8),
        "INT64": Count(1, 0, 64),
    }
    assert result.problems == ()
    save_file({**tensors, "awq.qweight": torch.zeros(8, 8, dtype=torch.int32)}, tmp_path / "model.safetensors")
    result = survey(SafetensorsWeights(tmp_path), unsupported)
    assert result.formats["INT32"] == Count(1, None, 256)
    assert result.total.parameters is None and result.total.bits_per_parameter is None


def test_reads_scales_and_no_weight(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Recorded(SafetensorsWeights):
        def read(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().read(name)

    directory = exports["llama NVFP4_DEFAULT_CFG kv"]
    told: list[tuple[int, int]] = []
    survey(Recorded(directory), read_declaration(directory), lambda done, total: told.append((done, total)))
    assert sorted(read) == sorted(name for name in load_file(directory / "model.safetensors") if "scale" in name)
    assert told == [(done, len(read)) for done in range(len(read))]


def test_names_the_shard_and_goes_by_any_prefix(exports: Exports, tmp_path: Path) -> None:
    """As an image model has them: language model under a prefix, a vision tower that caches nothing."""
    source = exports["llama NVFP4_DEFAULT_CFG kv"]
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tower = {f"model.visual.layers.0.self_attn.{name}_proj.weight": torch.zeros(64, 64).bfloat16() for name in "qkv"}
    excluded = ["lm_head", "model.language_model.embed_tokens", "model.visual*"]
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["ignore"] = excluded
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    places = {name: second if "layers.1" in name else first for name in tensors | tower}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for shard in (first, second):
        save_file({name: t for name, t in (tensors | tower).items() if places[name] == shard}, tmp_path / shard)
    assert surveyed(tmp_path).problems == ()
    broken = "model.language_model.layers.1.mlp.up_proj.input_scale"
    tensors[broken] = torch.tensor(float("nan"))
    save_file({name: t for name, t in tensors.items() if places[name] == second}, tmp_path / second)
    assert surveyed(tmp_path).problems == (
        f"{tmp_path / second}: {broken} is nan; a scale must be positive and finite",
    )
