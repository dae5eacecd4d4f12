"""Recorded networks, interpreted, against the torch executor's passes: all ranks of them against one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.ops.base import LayerCache
from dflash_trt.runtime.engine_io import CacheStorage
from tests.engine.recorded import NetworkPasses, TorchPasses, rank_pairs
from tests.models.test_dflash import as_speculators
from tests.quantized_models import quantized_drafter, quantized_target
from tests.tiny_models import random_drafter, random_target

SLIDING = {"use_sliding_window": True, "sliding_window": 6}
DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "sliding, not causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "scaled and capped": {
        "dflash_config": {
            "mask_token_id": 2,
            "target_layer_ids": [0, 2],
            "input_embedding_scale": 6.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        }
    },
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
}
FORMATS: dict[str, tuple[QuantAlgo, QuantAlgo | None]] = {
    "FP8": ("FP8", "NVFP4"),
    "NVFP4": ("NVFP4", None),
    "W4A16": ("W4A16_NVFP4", "FP8"),
}


@pytest.fixture(params=[False, True], ids=["native", "plugins"])
def plugins(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", TARGETS)
def test_families(family: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    target = random_target(tmp_path / "target", family, num_hidden_layers=3, **TARGETS[family])
    random_drafter(tmp_path / "drafter", target)
    compare(tmp_path, ranks, plugins=plugins)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters(drafter: str, tmp_path: Path, plugins: bool) -> None:
    target = random_target(tmp_path / "target", num_hidden_layers=3)
    random_drafter(tmp_path / "drafter", target, **DRAFTERS[drafter])
    compare(tmp_path, 2, plugins=plugins)


def test_a_drafter_with_a_head_of_its_own(tmp_path: Path, plugins: bool) -> None:
    target = random_target(tmp_path / "target", num_hidden_layers=3)
    random_drafter(tmp_path / "z-lab", target)
    token_ids = [3, 4, 9, 40, 41, 96]
    as_speculators(tmp_path / "z-lab", tmp_path / "drafter", token_ids, target.lm_head.weight[token_ids].clone())
    compare(tmp_path, 2, plugins=plugins)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("formats", FORMATS)
def test_formats(formats: str, ranks: int, tmp_path: Path, plugins: bool) -> None:
    algo, of_drafter = FORMATS[formats]
    target = quantized_target(tmp_path / "target", algo, num_hidden_layers=3)
    quantized_drafter(tmp_path / "drafter", target, of_drafter)
    compare(tmp_path, ranks, plugins=plugins)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_caches(ranks: int, tmp_path: Path) -> None:
    """Which native layers do not have."""
    target = quantized_target(tmp_path / "target", "FP8", fp8_cache=True, num_hidden_layers=3)
    quantized_drafter(tmp_path / "drafter", target, "FP8", fp8_cache=True)
    compare(tmp_path, ranks, plugins=True)


def compare(root: Path, ranks: int, *, plugins: bool = False) -> None:
    """Prefill of two slots in chunks; then twice, with a rollback between: a draft and a ragged verification."""
    config, (whole,) = rank_pairs(root / "target", root / "drafter", root / "one")
    expected = TorchPasses(whole, config)
    actual = NetworkPasses(*rank_pairs(root / "target", root / "drafter", root / "all", tp_size=ranks), plugins=plugins)
    generator = torch.Generator().manual_seed(0)
    block = whole.drafter.block_size

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, whole.target.vocab_size, shape, generator=generator)

    for slot, chunks in ((0, (7, 4)), (1, (5,))):
        start = 0
        for length in chunks:
            arguments = (tokens(1, length), torch.tensor([[length - 1]]), [start], [length], slot)
            close(actual.target(*arguments), expected.target(*arguments))
            start += length
    lengths, counts, rows = [11, 5], [block, 2], torch.tensor([[0, 1, 2, 3], [0, 1, 1, 1]])
    for emitted in ([3, 2], [1, 1]):
        anchors = tokens(2)
        close(actual.draft(anchors, lengths), expected.draft(anchors, lengths))
        verified = (tokens(2, block), rows, lengths, counts, 0)
        close(actual.target(*verified), expected.target(*verified))
        after = [length + count for length, count in zip(lengths, counts, strict=True)]
        for model in ("target", "drafter"):
            check_caches(getattr(expected.caches, model), actual.cache(model), after)
        lengths = [length + count for length, count in zip(lengths, emitted, strict=True)]


def check_caches(layers: Sequence[LayerCache], stored: CacheStorage, lengths: Sequence[int]) -> None:
    for index, layer in enumerate(layers):
        for slot, length in enumerate(lengths):
            close(stored.keys[index, slot, :, :length], layer.keys[slot, :, :length])
            close(stored.values[index, slot, :, :length], layer.values[slot, :, :length])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
