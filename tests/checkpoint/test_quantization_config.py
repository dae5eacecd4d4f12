"""Both places against what ModelOpt's own conversion makes of one, and reading what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.quantization_config import (
    KVCacheQuantAlgo,
    QuantAlgo,
    QuantizationConfig,
    read_hf_quant_config,
    read_quantization,
)
from dflash_trt.errors import UserError

ALGORITHMS = [
    (algo, kv)
    for algo in ("FP8", "NVFP4", "W4A16_NVFP4", None)
    for kv in ("FP8", None)
    if algo is not None or kv is not None
]


@pytest.mark.parametrize(("algo", "kv"), ALGORITHMS)
def test_config_json_says_what_modelopt_makes_of_its_own_file(algo: QuantAlgo, kv: KVCacheQuantAlgo) -> None:
    config = QuantizationConfig(algo, kv, ("lm_head", "model.embed_tokens") if algo else ())
    theirs = convert_hf_quant_config_format(config.to_hf_quant_config())
    assert json.dumps(config.to_quantization_config()) == json.dumps(theirs)


@pytest.mark.parametrize(("algo", "kv"), ALGORITHMS)
def test_reads_what_it_writes(tmp_path: Path, algo: QuantAlgo, kv: KVCacheQuantAlgo) -> None:
    config = QuantizationConfig(algo, kv, ("lm_head",) if algo else ())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(config.to_hf_quant_config()))
    inside = JsonObject({"quantization_config": config.to_quantization_config()}, tmp_path / "config.json")
    assert read_hf_quant_config(tmp_path / "hf_quant_config.json") == config
    assert read_quantization(inside) == config
    assert read_quantization(JsonObject({}, tmp_path / "config.json")) == config


def test_neither_place_is_unquantized(tmp_path: Path) -> None:
    assert read_quantization(JsonObject({}, tmp_path / "config.json")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "MIXED_PRECISION"}, 'quant_algo is "MIXED_PRECISION": not supported; supported are FP8, NVFP4'),
        ({"group_size": 32}, "group_size is 32: must be 16"),
        ({"kv_cache_quant_algo": "NVFP4"}, 'kv_cache_quant_algo is "NVFP4": not supported; supported are FP8'),
        ({"exclude_modules": "lm_head"}, "must be a list of strings"),
    ],
)
def test_refuses_by_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = QuantizationConfig("NVFP4", None, ()).to_hf_quant_config()
    content["quantization"] |= changes
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError) as refusal:
        read_hf_quant_config(tmp_path / "hf_quant_config.json")
    assert "hf_quant_config.json: quantization." in str(refusal.value) and message in str(refusal.value)


def test_excluded_modules_have_no_format() -> None:
    config = QuantizationConfig("FP8", None, ("lm_head", "model.layers.1.*"))
    modules = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "fc"]
    assert [config.algo_of(module) for module in modules] == [None, None, "FP8", "FP8"]
