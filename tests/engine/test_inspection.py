"""What `inspect` says, from the files alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_trt.engine.inspection import describe
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER
from tests.conftest import TINY, Engines
from tests.tiny_models import random_target


def test_target() -> None:
    description = describe(TINY / "target")
    assert description["kind"] == "target"
    assert description["architecture"] == "LlamaForCausalLM"
    tensors = load_file(TINY / "target/model.safetensors")
    assert sum(description["parameters"].values()) == sum(math.prod(t.shape) for t in tensors.values())
    assert description["bytes"] == sum(t.nbytes for t in tensors.values())


def test_drafter() -> None:
    description = describe(DRAFTER)
    assert description["kind"] == "DFlash drafter"
    assert description["block_size"] == 8
    assert description["parameters"] == {"bfloat16": 12_280_704}


def test_engine(llms: Engines) -> None:
    engine = llms["llama"].engine
    description = describe(engine.path)
    assert description["kind"] == "engine directory"
    assert description["build_config"]["dtype"] == "float64"
    assert description["cache_bytes"] == engine.config.cache_bytes
    on_disk = sum(file.stat().st_size for file in engine.path.rglob("*.safetensors"))
    assert 0 <= on_disk - description["bytes"] < 20_000


def test_refuses_weights_that_are_not_what_the_config_says(tmp_path: Path) -> None:
    random_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the tensor model\.norm\.weight, of shape \[48\]"):
        describe(tmp_path)
