"""What `inspect` says, from the files alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

from safetensors.torch import load_file, save_file

from dflash_trt.examples.smollm2 import DRAFTER, gguf_file
from dflash_trt.inspection.describe import describe
from tests.conftest import TINY, Engines
from tests.tiny_models import random_target


def test_target() -> None:
    description = describe(TINY / "target")
    assert description["kind"] == "target"
    assert description["architecture"] == "LlamaForCausalLM"
    tensors = load_file(TINY / "target/model.safetensors")
    assert description["parameters"] == sum(math.prod(t.shape) for t in tensors.values())
    assert description["bytes"] == sum(t.nbytes for t in tensors.values())
    assert description["bits_per_parameter"] == 16 and description["problems"] == []


def test_drafter() -> None:
    description = describe(DRAFTER)
    assert description["kind"] == "DFlash drafter"
    assert description["block_size"] == 8
    assert description["formats"]["BF16"]["parameters"] == description["parameters"] == 12_280_704


def test_engine(llms: Engines) -> None:
    engine = llms["llama"].engine
    description = describe(engine.path)
    assert description["kind"] == "engine directory"
    assert description["build_config"]["dtype"] == "float64"
    assert description["cache_bytes"] == engine.config.cache_bytes
    on_disk = sum(file.stat().st_size for file in engine.path.rglob("*.safetensors"))
    assert 0 <= on_disk - description["bytes"] < 20_000
    assert list(description["formats"]) == ["FP64"] and description["bits_per_parameter"] == 64


def test_weights_that_are_not_what_the_config_says_are_a_problem(tmp_path: Path) -> None:
    random_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert describe(tmp_path)["problems"] == [f"{tmp_path}: lacks the tensor model.norm.weight, of shape [48]"]


def test_a_config_that_is_not_supported_is_told(tmp_path: Path) -> None:
    random_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    description = describe(tmp_path)
    assert description["kind"] == "checkpoint" and description["architectures"] == ["LlamaForCausalLM"]
    assert 'hidden_act is "gelu"' in description["unsupported"] and description["problems"] == []


def test_gguf() -> None:
    description = describe(gguf_file())
    assert description["kind"] == "target" and description["problems"] == []
