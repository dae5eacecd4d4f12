"""How many parameters of a checkpoint are in which format, at how many bits each, and where it is not what it declares.

It goes by the names, shapes and types of tensors, so the architecture may be any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dflash_trt.checkpoint.declaration import Declaration
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.inspection.cache_faults import cache_faults
from dflash_trt.inspection.expectation import Expectation
from dflash_trt.inspection.faults import Fault, told
from dflash_trt.inspection.format_faults import format_faults
from dflash_trt.inspection.layers import QUANTIZED, Layer, bytes_of, parameters_of, read_layers
from dflash_trt.inspection.scale_faults import mxfp4_faults, scale_faults
from dflash_trt.inspection.scale_values import Progress, nothing, value_faults


@dataclass(frozen=True)
class Count:
    """What is held in one format.

    Attributes:
        modules: that have a weight in it.
        parameters: unpacked ones; None where whole numbers are packed in a way that is not known here.
        bytes: of the weights and of their scales.
    """

    modules: int
    parameters: int | None
    bytes: int

    @property
    def bits_per_parameter(self) -> float | None:
        """Bits of weights and scales for each parameter; None where there is none, or their number is not known."""
        return 8 * self.bytes / self.parameters if self.parameters else None


@dataclass(frozen=True)
class Survey:
    """What a checkpoint holds.

    Attributes:
        formats: NVFP4, FP8, MXFP4, BF16, ...; the scales of a weight count with its format.
        excluded: the weights that each declared pattern leaves unquantized.
        problems: one line for each way in which it is not what it declares or cannot be used as it is, with the file
            and the first tensor that shows it.
    """

    formats: Mapping[str, Count]
    excluded: Mapping[str, tuple[str, ...]]
    problems: tuple[str, ...]

    @property
    def total(self) -> Count:
        """All formats together."""
        return total(self.formats.values())

    @property
    def quantized(self) -> Count:
        """The formats that need scales, together."""
        return total(count for name, count in self.formats.items() if name in QUANTIZED)


def survey(weights: Weights, declaration: Declaration, progress: Progress = nothing) -> Survey:
    """Count a checkpoint and check it against what it declares.

    Of a checkpoint whose declaration is not supported, it checks only what no declaration makes right: scales that are
    not finite, and MXFP4 blocks without scales of their shape.

    Reads headers and scales, one tensor at a time; no weight.

    Args:
        weights: the checkpoint.
        declaration: what its files say of its quantization.
        progress: told how many of how many scales have been read.
    """
    quantization = declaration.quantization
    layers = read_layers(weights, quantization is not None and quantization.quant_algo in ("NVFP4", "W4A16_NVFP4"))
    expectation = Expectation(declaration, (layer.module for layer in layers))
    faults: list[Fault] = []
    if declaration.unsupported is None:
        faults += format_faults(weights, layers, expectation)
        faults += (fault for layer in layers for fault in scale_faults(weights, layer, expectation))
        faults += cache_faults(weights, layers, expectation)
    faults += (fault for layer in layers for fault in mxfp4_faults(weights, layer))
    faults += value_faults(weights, layers, declaration.unsupported is None, progress)
    weight_of = {layer.module: layer.weight for layer in layers if layer.weight is not None}
    excluded = {
        pattern: tuple(weight_of[module] for module in modules if module in weight_of)
        for pattern, modules in expectation.excluded.items()
    }
    return Survey(count_formats(weights, layers), excluded, (*declaration.contradictions, *told(faults)))


def count_formats(weights: Weights, layers: Iterable[Layer]) -> dict[str, Count]:
    """Modules, parameters and bytes by format; reads headers only."""
    by_format: defaultdict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        by_format[layer.format].append(layer)
    return {name: _count(weights, held) for name, held in by_format.items()}


def total(counts: Iterable[Count]) -> Count:
    """Of several formats together; a module that is in two of them counts twice."""
    counts = list(counts)
    parameters = _sum(count.parameters for count in counts)
    return Count(sum(count.modules for count in counts), parameters, sum(count.bytes for count in counts))


def counted(formats: Mapping[str, Count]) -> dict[str, Any]:
    """Counts by format and all together, as `inspect` tells them."""
    shown = {name: {**asdict(count), "bits_per_parameter": count.bits_per_parameter} for name, count in formats.items()}
    together = total(formats.values())
    return {
        "formats": shown,
        "parameters": together.parameters,
        "bytes": together.bytes,
        "bits_per_parameter": together.bits_per_parameter,
    }


def merged(parts: Iterable[Mapping[str, Count]]) -> dict[str, Count]:
    """By format, of several checkpoints together."""
    by_format: defaultdict[str, list[Count]] = defaultdict(list)
    for part in parts:
        for name, count in part.items():
            by_format[name].append(count)
    return {name: total(counts) for name, counts in by_format.items()}


def _count(weights: Weights, layers: list[Layer]) -> Count:
    modules = {layer.module if layer.is_quantized else _owner(layer) for layer in layers}
    parameters = _sum(parameters_of(weights, layer) for layer in layers)
    return Count(len(modules), parameters, sum(bytes_of(weights, layer) for layer in layers))


def _owner(layer: Layer) -> str:
    """The module of an unquantized tensor, which may be one of several there."""
    return layer.weight.rpartition(".")[0] if layer.weight else layer.module


def _sum(numbers: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    result = 0
    for number in numbers:
        if number is None:
            return None
        result += number
    return result
