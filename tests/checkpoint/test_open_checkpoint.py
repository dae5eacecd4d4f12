"""What opening reads; how weights are held to their config is in tests/models/test_weights.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER


def save(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_gguf(smollm2_path: Path) -> None:
    for path in (smollm2_path, smollm2_path.parent):
        target = open_target(path)
        assert target.path == target.weights.path == smollm2_path
        assert target.config.tie_word_embeddings


def test_hugging_face_directory(tmp_path: Path, llama_config: dict[str, Any]) -> None:
    target = open_target(save(tmp_path, llama_config, {"model.norm.weight": torch.ones(32)}))
    assert target.path == target.weights.path == tmp_path
    assert target.config.num_hidden_layers == 3 and target.weights.names() == ("model.norm.weight",)


def test_example() -> None:
    drafter = open_drafter(DRAFTER)
    assert drafter.path == drafter.weights.path == DRAFTER
    assert drafter.config.num_hidden_layers == 3


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.arange(40) * 2, "d2t maps a draft id to 96, outside a vocabulary of 96"),
        (-torch.arange(40), "d2t maps two draft ids to one token"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_refuses_a_bad_map(
    tmp_path: Path, speculators_config: dict[str, Any], d2t: torch.Tensor, message: str, dtype: torch.dtype
) -> None:
    with pytest.raises(UserError) as refusal:
        open_drafter(save(tmp_path, speculators_config, {"d2t": d2t.to(dtype)}))
    assert str(refusal.value).startswith(f"{tmp_path / 'model.safetensors'}: {message}")


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": torch.arange(40) + 16},
        {"d2t": torch.full((39,), 1000)},
        {"d2t": torch.zeros(40, 1, dtype=torch.int64)},
        {"d2t": torch.zeros(40)},
        {"norm.weight": torch.ones(32)},
    ],
    ids=["good", "too short", "a matrix", "floating-point", "none"],
)
def test_leaves_other_maps_to_the_model(
    tmp_path: Path, speculators_config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    assert open_drafter(save(tmp_path, speculators_config, tensors)).config.has_reduced_vocabulary


def test_refuses_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/config\.json: no such file"):
        open_target(tmp_path / "nowhere")
