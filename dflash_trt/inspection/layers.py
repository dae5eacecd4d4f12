"""What belongs together in a checkpoint of any architecture: every weight and what scales it, by their names.

ModelOpt's unified checkpoints name them `MODULE.weight`, `MODULE.weight_scale` and so on, or `PARAMETER_weight_scale`
where experts share one parameter; gpt-oss `PARAMETER_blocks` and `PARAMETER_scales`; compressed-tensors
`MODULE.weight_packed` and `MODULE.weight_global_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.quantization.mxfp4 import MXFP4_BLOCK

CACHE_SCALES = ("k_scale", "v_scale")
SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    *CACHE_SCALES,
)
QUANTIZED = ("NVFP4", "MXFP4", "FP8", "FP8_BLOCKS", "MXFP8", "INT8")
"""Formats of weights that need scales; FP8_BLOCKS has one for every 128 x 128 weights (`weight_scale_inv`)."""

_WEIGHTS = ("weight", "weight_packed")
_SUFFIXES = ("weight_scale_2", "weight_scale", "input_scale")
_MXFP4_SUFFIXES = ("blocks", "scales")
_PARAMETER = "parameter"
_HOLDERS = (*_WEIGHTS, "blocks", _PARAMETER)

_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_PLAIN = {
    torch.float64: "FP64",
    torch.float32: "FP32",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float8_e5m2: "FP8_E5M2",
}
_NO_LINEAR = ("embed", "norm", "wte", "wpe")
"""Parts of the names that modules with a two-dimensional weight have where they are no linear layers."""


@dataclass(frozen=True)
class Layer:
    """A weight and its scales.

    Attributes:
        module: what it is called in `exclude_modules`.
        weight: the tensor that holds it; None where there are only scales.
        format: one of `QUANTIZED`, else the type of what `weight` holds; "SCALES" where there is none.
        shape: of the weight, unpacked; of an integer type that is none of the formats, as stored.
        scales: tensors by what they are called in this module.
    """

    module: str
    weight: str | None
    format: str
    shape: tuple[int, ...]
    scales: Mapping[str, str]

    @property
    def is_quantized(self) -> bool:
        """It is held in one of the `QUANTIZED` formats."""
        return self.format in QUANTIZED

    @property
    def is_linear(self) -> bool:
        """By its name and shape it is a linear layer, not an embedding, a norm or a convolution."""
        last = self.module.rpartition(".")[2].lower()
        named = self.weight == f"{self.module}.weight" and not any(part in last for part in _NO_LINEAR)
        return named and len(self.shape) == 2


def read_layers(weights: Weights, packed: bool = False) -> tuple[Layer, ...]:
    """Every tensor of a checkpoint, those that belong together in one layer; reads headers only.

    Args:
        weights: the checkpoint.
        packed: uint8 weights without a scale are NVFP4 too, because the checkpoint is declared to be.
    """
    modules: dict[str, dict[str, str]] = {}
    for name in weights.names():
        module, part = _split(name, weights.dtype(name))
        modules.setdefault(module, {})[part] = name
    return tuple(_layer(weights, module, parts, packed) for module, parts in modules.items())


def bytes_of(weights: Weights, layer: Layer) -> int:
    """Of its weight and its scales."""
    names = [name for name in (layer.weight, *layer.scales.values()) if name is not None]
    return sum(math.prod(weights.shape(name)) * weights.dtype(name).itemsize for name in names)


def parameters_of(weights: Weights, layer: Layer) -> int | None:
    """How many it has, unpacked; None for whole numbers that are packed in a way that is not known here."""
    if layer.weight is None:
        return 0
    dtype = weights.dtype(layer.weight)
    if layer.is_quantized or dtype.is_floating_point:
        return math.prod(layer.shape)
    # One dimension, or a mask: token ids, indices. More: parameters, packed by somebody else's rules.
    return 0 if len(layer.shape) < 2 or dtype == torch.bool else None


def type_name(dtype: torch.dtype) -> str:
    """As torch names it: float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")


def _split(name: str, dtype: torch.dtype) -> tuple[str, str]:
    module, _, part = name.rpartition(".")
    if part in SCALES or part in _WEIGHTS:
        return module, part
    for suffix in _SUFFIXES + (_MXFP4_SUFFIXES if dtype == torch.uint8 else ()):
        if part.endswith(f"_{suffix}"):
            return name[: -len(suffix) - 1], suffix
    return name, _PARAMETER


def _layer(weights: Weights, module: str, parts: dict[str, str], packed: bool) -> Layer:
    holder = next((part for part in _HOLDERS if part in parts), None)
    scales = {part: name for part, name in parts.items() if part != holder}
    if holder is None:
        return Layer(module, None, "SCALES", (), scales)
    weight = parts[holder]
    stored = weights.shape(weight)
    if holder == "blocks":
        return Layer(module, weight, "MXFP4", (*stored[:-2], stored[-2] * MXFP4_BLOCK), scales)
    types = {part: weights.dtype(name) for part, name in scales.items()}
    found = _format(weights.dtype(weight), types, packed and holder == "weight")
    shape = (*stored[:-1], 2 * stored[-1]) if found in ("NVFP4", "MXFP4") else stored
    return Layer(module, weight, found, shape, scales)


def _format(dtype: torch.dtype, scales: Mapping[str, torch.dtype], packed: bool) -> str:
    scale = scales.get("weight_scale")
    if dtype == torch.uint8 and (packed or not scales.keys().isdisjoint(("weight_scale", "weight_scale_2"))):
        return "MXFP4" if scale in _E8M0 and "weight_scale_2" not in scales else "NVFP4"
    if dtype == torch.float8_e4m3fn:
        if "weight_scale_inv" in scales:
            return "FP8_BLOCKS"
        return "MXFP8" if scale in _E8M0 else "FP8"
    if dtype == torch.int8 and scale is not None:
        return "INT8"
    return _PLAIN.get(dtype) or type_name(dtype).upper()
