"""What a conversion cost each linear layer's weight, read a layer at a time and compared a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.errors import UserError
from dflash_trt.models.weights import CheckpointLoader, Manifest
from dflash_trt.quantization.fp8 import FP8Tensor, decode_e4m3
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4

_AT_ONCE = 1 << 20
"""Numbers of a weight that are compared at once, so that a layer is never in memory in float64."""


@dataclass(frozen=True)
class LayerError:
    """How far the weight Q that a layer stands for is from the original W.

    Attributes:
        layer: its name, `model.layers.0.mlp.up_proj` for one.
        format: FP8, NVFP4 or W4A16_NVFP4; where it is unquantized, its type.
        relative_error: ||W - Q|| / ||W||, the root mean square of the error over that of the weight.
        snr_db: the same as a signal-to-noise ratio, -20 log10 of it; None where there is no error.
        worst_element: max |W - Q| / max |W|.
    """

    layer: str
    format: str
    relative_error: float
    snr_db: float | None
    worst_element: float


@dataclass(frozen=True)
class FormatSummary:
    """All layers of one format.

    Attributes:
        format: as in `LayerError`.
        layers: how many there are.
        median_relative_error: over these.
        worst_relative_error: the largest.
        worst_layer: the layer that has it, the first of several.
    """

    format: str
    layers: int
    median_relative_error: float
    worst_relative_error: float
    worst_layer: str


@dataclass(frozen=True)
class WeightErrors:
    """All linear layers of a model, in its order; formats in the order of their first layers."""

    formats: tuple[FormatSummary, ...]
    layers: tuple[LayerError, ...]


def weight_errors(original: Weights, converted: Manifest, advance: Callable[[int], None]) -> WeightErrors:
    """Compare every linear layer of a converted model with the original, in float64.

    Args:
        original: unquantized.
        converted: of the same model; in any format.
        advance: told the original's bytes of every layer, when it is compared.

    Raises:
        UserError: a layer is missing, has another shape, or holds what is not finite.
    """
    layers = []
    for layer in converted.linears:
        layers.append(_layer_error(original, converted, layer))
        advance(layer_bytes(original, layer))
    formats = dict.fromkeys(found.format for found in layers)
    summaries = (_summary([found for found in layers if found.format == each]) for each in formats)
    return WeightErrors(tuple(summaries), tuple(layers))


def layer_bytes(weights: Weights, layer: str) -> int:
    """What a layer's unquantized weight takes."""
    name = f"{layer}.weight"
    return math.prod(weights.shape(name)) * weights.dtype(name).itemsize


def _summary(layers: list[LayerError]) -> FormatSummary:
    worst = max(layers, key=lambda layer: layer.relative_error)
    return FormatSummary(
        format=worst.format,
        layers=len(layers),
        median_relative_error=median(layer.relative_error for layer in layers),
        worst_relative_error=worst.relative_error,
        worst_layer=worst.layer,
    )


def _layer_error(original: Weights, converted: Manifest, layer: str) -> LayerError:
    name = f"{layer}.weight"
    weight = original.read(name)
    stored = CheckpointLoader(converted.weights, lambda tensor: tensor).linear(layer, *weight.shape).weight
    signal = noise = largest = furthest = 0.0
    for rows in _parts(weight):
        source = weight[rows].double()
        error = source - _dequantized(stored, rows)
        signal, noise = signal + float(source.square().sum()), noise + float(error.square().sum())
        largest, furthest = max(largest, float(source.abs().max())), max(furthest, float(error.abs().max()))
    if not math.isfinite(noise) or (noise and not signal):
        raise UserError(
            f"{converted.weights.file_of(name)}: {name} is no conversion of that in {original.file_of(name)}: one "
            "of them holds NaN or infinity, or the original is zero"
        )
    relative = math.sqrt(noise / signal) if noise else 0.0
    return LayerError(
        layer=layer,
        format=_format(converted, layer),
        relative_error=relative,
        snr_db=-20 * math.log10(relative) if relative else None,
        worst_element=furthest / largest if furthest else 0.0,
    )


def _format(converted: Manifest, layer: str) -> str:
    algo = None if converted.quantization is None else converted.quantization.algo_of(layer)
    return algo or str(converted.weights.dtype(f"{layer}.weight")).removeprefix("torch.")


def _parts(weight: Tensor) -> Iterator[slice]:
    rows = max(1, _AT_ONCE // weight.shape[1])
    return (slice(start, start + rows) for start in range(0, len(weight), rows))


def _dequantized(stored: Tensor | FP8Tensor | NVFP4Tensor, rows: slice) -> Tensor:
    """Some rows of a weight as it is computed with, in float64."""
    if isinstance(stored, FP8Tensor):
        return decode_e4m3(stored.weight[rows]).double() * stored.weight_scale
    if isinstance(stored, NVFP4Tensor):
        part = stored._replace(weight=stored.weight[rows], weight_scale=stored.weight_scale[rows])
        return dequantize_nvfp4(part).double()
    return stored[rows].double()
