"""What is refused when weights and config disagree, before any data is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.errors import UserError
from dflash_trt.models.pair import load_target
from dflash_trt.models.weights import Manifest
from tests.tiny_models import random_target

Tensors = dict[str, torch.Tensor]


def manifest_of(directory: Path) -> Manifest:
    manifest = Manifest(SafetensorsWeights(directory))
    load_target(manifest, TargetConfig.from_pretrained(directory))
    manifest.refuse_unread()
    return manifest


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors: Tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


def test_lists_what_the_model_reads(tmp_path: Path) -> None:
    random_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert manifest_of(tmp_path).floats == {name: tuple(tensors[name].shape) for name in tensors}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "lacks the tensor model.norm.weight"),
        ({"model.norm.weight": torch.ones(47)}, "model.norm.weight has shape [47], its config.json makes it [48]"),
        ({"model.norm.weight": torch.ones(48, dtype=torch.int8)}, "model.norm.weight has type int8, it must be float64"),
        ({"model.layers.3.self_attn.q_proj.bias": torch.ones(64)}, "holds 1 tensors that config.json has no place for"),
    ],
)
def test_refuses_weights_of_another_model(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    random_target(tmp_path)
    rewrite(tmp_path, **change)
    with pytest.raises(UserError) as error:
        manifest_of(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_lets_redundant_tensors_be(tmp_path: Path) -> None:
    random_target(tmp_path, tie_word_embeddings=True)
    rewrite(
        tmp_path,
        **{"lm_head.weight": torch.zeros(97, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)},
    )
    assert "lm_head.weight" not in manifest_of(tmp_path).floats
