"""Scales that a weight's format needs and that are missing or misshapen, and scales of nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.inspection.expectation import Expectation
from dflash_trt.inspection.faults import Fault
from dflash_trt.inspection.layers import CACHE_SCALES, Layer, type_name
from dflash_trt.quantization.mxfp4 import MXFP4_BLOCK
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK

SCALAR_SHAPES = ((), (1,))
"""Loaders take both; ModelOpt writes the first."""

_WEIGHT_SCALES = {
    "FP8": {"weight_scale": torch.float32},
    "NVFP4": {"weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
}
_INPUT_SCALE = "input_scale"


def scale_faults(weights: Weights, layer: Layer, expectation: Expectation) -> Iterator[Fault]:
    """What is wrong with the scales of one layer, but for those of cached keys and values; reads headers only."""
    if layer.weight is None or not layer.is_quantized:
        why = f"there is no {layer.module}.weight" if layer.weight is None else f"{layer.weight} is {layer.format}"
        for part, name in layer.scales.items():
            if part not in CACHE_SCALES:
                yield Fault(("scale of nothing", layer.format), weights.file_of(name), name, f"scales nothing: {why}")
    elif layer.format == "NVFP4" and layer.shape[-1] % NVFP4_BLOCK:
        what = f"has {layer.shape[-1]} values a row; NVFP4 needs a multiple of {NVFP4_BLOCK}"
        yield Fault(("uneven",), weights.file_of(layer.weight), layer.weight, what)
    else:
        for part, dtype in _WEIGHT_SCALES.get(layer.format, {}).items():
            yield from _scale_fault(weights, layer, part, dtype)
        yield from _input_scale_faults(weights, layer, expectation)


def mxfp4_faults(weights: Weights, layer: Layer) -> Iterator[Fault]:
    """What is wrong with the shape of gpt-oss's scales, which is the same whatever is declared; reads headers only."""
    if layer.weight != f"{layer.module}_blocks":
        return
    stored, name = weights.shape(layer.weight), layer.scales.get("scales")
    needs = f"blocks of {list(stored)} need uint8 {list(stored[:-1])}"
    if name is None:
        file = weights.file_of(layer.weight)
        yield Fault(("scales", "missing"), file, f"{layer.module}_scales", f"is missing; {needs}")
    elif stored != (*weights.shape(name), MXFP4_BLOCK // 2):
        what = f"has shape {list(weights.shape(name))}; {needs}"
        yield Fault(("scales", "shape"), weights.file_of(name), name, what)


def _input_scale_faults(weights: Weights, layer: Layer, expectation: Expectation) -> Iterator[Fault]:
    name = layer.scales.get(_INPUT_SCALE)
    as_declared = layer.format == expectation.format_of(layer.module)
    if as_declared and not expectation.needs_input_scales and name is not None:
        what = f"is there, but {expectation.source} declares {expectation.algo}, which quantizes weights only"
        yield Fault((_INPUT_SCALE, "unexpected"), weights.file_of(name), name, what)
    elif as_declared and expectation.needs_input_scales:
        yield from _scale_fault(weights, layer, _INPUT_SCALE, torch.float32)


def _scale_fault(weights: Weights, layer: Layer, part: str, dtype: torch.dtype) -> Iterator[Fault]:
    assert layer.weight is not None
    blocks = (*layer.shape[:-1], layer.shape[-1] // NVFP4_BLOCK)
    shapes = (blocks,) if dtype == torch.float8_e4m3fn else SCALAR_SHAPES
    needs = f"{layer.format} weights of {list(layer.shape)} need {type_name(dtype)} {list(shapes[0])}"
    name = layer.scales.get(part)
    if name is None:
        missing = f"{layer.module}{'_' if layer.weight == layer.module else '.'}{part}"
        yield Fault((part, "missing"), weights.file_of(layer.weight), missing, f"is missing; {needs}")
    elif weights.dtype(name) != dtype:
        yield Fault((part, "type"), weights.file_of(name), name, f"is {type_name(weights.dtype(name))}; {needs}")
    elif len(layer.shape) == 2 and weights.shape(name) not in shapes:
        # Loaders differ in the shapes that they take where one tensor holds the weights of several experts.
        yield Fault((part, "shape"), weights.file_of(name), name, f"has shape {list(weights.shape(name))}; {needs}")
