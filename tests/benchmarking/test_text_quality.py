"""Perplexity, agreement and divergence against transformers' own loss and logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.benchmarking import text_quality
from dflash_trt.benchmarking.text_quality import TextQuality, compare_on_text
from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.errors import UserError
from tests.quantized_models import FakeFP8Cache, quantized_target, reference_target
from tests.tiny_models import random_target

SAMPLES = [
    torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (2, 9, 23, 33)
]


def compare(original: Path, converted: Path, dtype: torch.dtype = torch.float64) -> TextQuality:
    targets = (open_target(directory) for directory in (original, converted))
    return compare_on_text(*targets, SAMPLES, dtype, lambda samples: None)


def read(model: Any, ids: list[int], cache: Any = None) -> tuple[float, Tensor]:
    """transformers' loss of a sample, summed over its tokens, and the log-probabilities [T - 1, V] before them."""
    output = model(torch.tensor([ids]), labels=torch.tensor([ids]), past_key_values=cache)
    return float(output.loss) * (len(ids) - 1), output.logits[0, :-1].double().log_softmax(-1)


def expected(original: Any, converted: Any, fp8_cache: Path | None) -> TextQuality:
    original_loss = converted_loss = agreements = divergence = 0.0
    for ids in SAMPLES:
        cache = None if fp8_cache is None else FakeFP8Cache(fp8_cache, "model.")
        (loss, p), (other_loss, q) = read(original, ids), read(converted, ids, cache)
        original_loss, converted_loss = original_loss + loss, converted_loss + other_loss
        agreements += int((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float(F.kl_div(q, p, reduction="sum", log_target=True))
    tokens = sum(len(ids) - 1 for ids in SAMPLES)
    losses = (math.exp(loss / tokens) for loss in (original_loss, converted_loss))
    return TextQuality(len(SAMPLES), tokens, *losses, agreements / tokens, divergence / tokens)


@pytest.mark.parametrize(
    ("algo", "fp8_cache", "family"),
    [
        ("W4A16_NVFP4", False, "llama"),
        ("NVFP4", False, "llama"),
        ("FP8", False, "qwen3"),
        ("FP8", True, "llama"),
        ("W4A16_NVFP4", True, "qwen3"),
    ],
)
@torch.inference_mode()
def test_equals_transformers(
    tmp_path: Path, algo: QuantAlgo, fp8_cache: bool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dequantized weights, with hooks that quantize activations and caches; samples longer than a pass among ours."""
    monkeypatch.setattr(text_quality, "_HEAD_ROWS", 4)
    monkeypatch.setattr(text_quality, "_PASS_ROWS", 12)
    original = random_target(tmp_path / "original", family)
    quantized_target(tmp_path / "converted", algo, fp8_cache=fp8_cache, family=family)
    theirs = expected(
        original.double(), reference_target(tmp_path / "converted"), tmp_path / "converted" if fp8_cache else None
    )
    ours = compare(tmp_path / "original", tmp_path / "converted")
    assert (ours.samples, ours.tokens, ours.greedy_agreement) == (4, 63, theirs.greedy_agreement)
    # transformers computes norms and losses in float32 whatever the model's type is.
    for field in ("original_perplexity", "converted_perplexity", "mean_kl_divergence"):
        assert getattr(ours, field) == pytest.approx(getattr(theirs, field), rel=1e-5), field
    assert 0.3 < ours.greedy_agreement < 1 and ours.mean_kl_divergence > 0.01


@torch.inference_mode()
def test_float32_is_close_enough(tmp_path: Path) -> None:
    random_target(tmp_path / "original")
    quantized_target(tmp_path / "converted", "W4A16_NVFP4")
    wide = compare(tmp_path / "original", tmp_path / "converted")
    narrow = compare(tmp_path / "original", tmp_path / "converted", torch.float32)
    assert narrow.original_perplexity == pytest.approx(wide.original_perplexity, rel=1e-5)
    assert narrow.converted_perplexity == pytest.approx(wide.converted_perplexity, rel=1e-5)


@torch.inference_mode()
def test_quantized_activations_do_not_depend_on_the_rows_of_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, as an engine of the converted target runs: else the report is not of what will be served."""
    random_target(tmp_path / "original", intermediate_size=64)
    quantized_target(tmp_path / "converted", "NVFP4", intermediate_size=64)
    original, converted = (open_target(tmp_path / name) for name in ("original", "converted"))
    samples = torch.randint(3, 97, (8, 512), generator=torch.Generator().manual_seed(0)).tolist()
    perplexities = []
    for rows in (512, 64):
        monkeypatch.setattr(text_quality, "_PASS_ROWS", rows)
        report = compare_on_text(original, converted, samples, torch.float32, lambda samples: None)
        perplexities.append(report.converted_perplexity)
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-7)


def test_a_sample_does_not_see_the_one_before(tmp_path: Path) -> None:
    random_target(tmp_path)
    target = open_target(tmp_path)
    alone = compare_on_text(target, target, SAMPLES[1:2], torch.float64, lambda samples: None)
    told: list[int] = []
    twice = compare_on_text(target, target, SAMPLES[1:2] * 2, torch.float64, told.append)
    assert twice.original_perplexity == alone.original_perplexity == alone.converted_perplexity
    assert (twice.tokens, told) == (2 * alone.tokens, [1, 1])


def test_refuses_logits_that_are_not_finite(tmp_path: Path) -> None:
    model = random_target(tmp_path)
    model.model.norm.weight.data[0] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="logits are not finite"):
        compare(tmp_path, tmp_path)
