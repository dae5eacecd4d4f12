"""Weights that are in another format than their checkpoint declares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.inspection.expectation import Expectation
from dflash_trt.inspection.faults import Fault
from dflash_trt.inspection.layers import Layer, bytes_of, parameters_of


def format_faults(weights: Weights, layers: Sequence[Layer], expectation: Expectation) -> Iterator[Fault]:
    """Layers that are quantized otherwise than declared, or not at all; reads headers only."""
    wrong = [layer for layer in layers if _is_wrong(layer, expectation)]
    nothing_quantized = not any(layer.is_quantized for layer in layers)
    if nothing_quantized and expectation.algo is not None and not wrong:
        what = "is declared, but nothing is quantized"
        yield Fault(("nothing quantized",), expectation.source, expectation.algo, what)
    for layer in wrong:
        assert layer.weight is not None
        what = f"is {layer.format}, {_bits(weights, layer)} bits per parameter, "
        what += "and nothing is quantized, " if nothing_quantized else ""
        kind = (layer.format, str(expectation.pattern_of(layer.module)))
        yield Fault(kind, weights.file_of(layer.weight), layer.weight, what + _objection(layer, expectation))


def _is_wrong(layer: Layer, expectation: Expectation) -> bool:
    """Only of layers that are linear for sure does an unquantized one show anything."""
    expected = expectation.format_of(layer.module)
    return layer.format != expected and (layer.is_quantized or (expected is not None and layer.is_linear))


def _objection(layer: Layer, expectation: Expectation) -> str:
    pattern = expectation.pattern_of(layer.module)
    if expectation.algo is None:
        return f"but {expectation.source} declares no quantization of weights"
    if pattern is not None:
        return f"but {expectation.source} excludes {json.dumps(pattern)}"
    unnamed = "" if layer.is_quantized else f" and does not exclude {layer.module}"
    return f"but {expectation.source} declares {expectation.algo}{unnamed}"


def _bits(weights: Weights, layer: Layer) -> str:
    return f"{8 * bytes_of(weights, layer) / max(1, parameters_of(weights, layer) or 0):.1f}"
