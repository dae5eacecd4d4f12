"""Weight errors against those of weights that ModelOpt quantized and dequantized."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_trt.benchmarking import weight_error
from dflash_trt.benchmarking.weight_error import WeightErrors, layer_bytes, weight_errors
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.conversion.plan import QFormat
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from tests.quantized_models import quantized_target, reference_target
from tests.tiny_models import random_target


def target_errors(original: Path, converted: Path) -> WeightErrors:
    manifest = target_manifest(open_target(converted))
    return weight_errors(open_target(original).weights, manifest, lambda nbytes: None)


def matrices(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights of linear layers in float64, by layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module.weight.detach().double() for name, module in layers.items()}


@pytest.mark.parametrize("algo", ["FP8", "NVFP4", "W4A16_NVFP4"])
def test_equals_that_of_dequantized_weights(tmp_path: Path, algo: QuantAlgo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over a few rows at a time, the last of them fewer."""
    monkeypatch.setattr(weight_error, "_AT_ONCE", 48 * 5)
    random_target(tmp_path / "original")
    originals = matrices(quantized_target(tmp_path / "converted", algo))
    quantized = matrices(reference_target(tmp_path / "converted"))
    found = target_errors(tmp_path / "original", tmp_path / "converted")

    assert [layer.layer for layer in found.layers if layer.layer != "lm_head"] == [
        name for name in originals if name != "lm_head"
    ]
    for layer in found.layers:
        original, error = originals[layer.layer], originals[layer.layer] - quantized[layer.layer]
        assert layer.relative_error == pytest.approx(float(error.norm() / original.norm()), rel=1e-12)
        assert layer.worst_element == pytest.approx(float(error.abs().max() / original.abs().max()), rel=1e-12)
        if layer.layer == "lm_head":
            assert (layer.format, layer.relative_error, layer.snr_db) == ("float32", 0, None)
        else:
            noise = float(error.square().mean())
            assert layer.format == algo and noise > 0
            assert layer.snr_db == pytest.approx(10 * math.log10(float(original.square().mean()) / noise), rel=1e-12)


def test_summaries_are_of_one_format_each(tmp_path: Path) -> None:
    random_target(tmp_path / "original")
    quantized_target(tmp_path / "converted", "NVFP4")
    found = target_errors(tmp_path / "original", tmp_path / "converted")
    nvfp4, unquantized = found.formats
    errors = {layer.layer: layer.relative_error for layer in found.layers if layer.format == "NVFP4"}
    assert (nvfp4.format, nvfp4.layers, nvfp4.worst_relative_error) == ("NVFP4", 4 * 7, max(errors.values()))
    assert errors[nvfp4.worst_layer] == nvfp4.worst_relative_error
    assert nvfp4.median_relative_error == float(torch.tensor(list(errors.values()), dtype=torch.float64).quantile(0.5))
    assert (unquantized.format, unquantized.layers, unquantized.worst_layer) == ("float32", 1, "lm_head")


def test_of_trained_weights_nvfp4_loses_more_than_fp8(trained: Path, converted: Callable[[QFormat], Path]) -> None:
    """e4m3 keeps three bits behind the leading one, e2m1 one."""
    for name, opened, manifest_of in (
        ("target", open_target, target_manifest),
        ("drafter", open_drafter, drafter_manifest),
    ):
        original = opened(trained / name).weights
        fp8, nvfp4 = (
            weight_errors(original, manifest_of(opened(converted(qformat) / name)), lambda nbytes: None).layers
            for qformat in ("fp8", "nvfp4")
        )
        quantized = [(one, other) for one, other in zip(fp8, nvfp4, strict=True) if one.format == "FP8"]
        assert len(quantized) == 7 * {"target": 4, "drafter": 2}[name]
        for one, other in quantized:
            assert one.layer == other.layer and other.format == "NVFP4"
            assert 0.02 < one.relative_error < 0.04 < 0.08 < other.relative_error < 0.12


def test_advances_by_all_bytes(tmp_path: Path) -> None:
    random_target(tmp_path)
    target, told = open_target(tmp_path), []
    manifest = target_manifest(target)
    found = weight_errors(target.weights, manifest, told.append)
    assert sum(told) == sum(layer_bytes(target.weights, layer) for layer in manifest.linears)
    assert all(layer.relative_error == layer.worst_element == 0 for layer in found.layers)


def test_a_weight_of_zeros_has_no_error(tmp_path: Path) -> None:
    random_target(tmp_path)
    rewrite(tmp_path, lambda weight: torch.zeros_like(weight))
    assert all(layer.relative_error == 0 for layer in target_errors(tmp_path, tmp_path).layers)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_refuses_what_is_not_finite(tmp_path: Path, value: float) -> None:
    random_target(tmp_path)
    rewrite(tmp_path, lambda weight: weight.index_fill(0, torch.tensor(0), value))
    with pytest.raises(UserError, match=r"k_proj\.weight is no conversion .* NaN or infinity"):
        target_errors(tmp_path, tmp_path)


def test_refuses_other_weights_for_zeros(tmp_path: Path) -> None:
    for name in ("zeros", "others"):
        random_target(tmp_path / name)
    rewrite(tmp_path / "zeros", lambda weight: torch.zeros_like(weight))
    with pytest.raises(UserError, match="the original is zero"):
        target_errors(tmp_path / "zeros", tmp_path / "others")


def rewrite(directory: Path, change: Callable[[Tensor], Tensor]) -> None:
    file, name = directory / "model.safetensors", "model.layers.1.self_attn.k_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name])}, file)
