"""Scales of cached keys and values that are not those that their checkpoint declares."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.inspection.expectation import Expectation
from dflash_trt.inspection.faults import Fault
from dflash_trt.inspection.layers import CACHE_SCALES, Layer, type_name
from dflash_trt.inspection.scale_faults import SCALAR_SHAPES

_PROJECTION = re.compile(r"\.[kv]_proj$")
_NUMBER = re.compile(r"\d+")


def cache_faults(weights: Weights, layers: Sequence[Layer], expectation: Expectation) -> Iterator[Fault]:
    """Scales that are missing, that nothing declares, that are no scalars or that scale nothing; reads headers only.

    A declared FP8 cache may have none at all, what ModelOpt writes with `use_constant_amax`: then all of them are 1.
    Where some attention has one, each attention of that kind has two, also where k and v share a weight. The attentions
    of a vision tower, which cache nothing, are of another kind.
    """
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for layer in layers:
        for part in CACHE_SCALES:
            if part in layer.scales:
                found[_attention(layer)][part] = layer.scales[part]
    with_weights = {layer.module.rpartition(".")[0] for layer in layers if layer.weight is not None}
    for attention, scales in found.items():
        for part, name in scales.items():
            fault = partial(Fault, file=weights.file_of(name), tensor=name)
            shape, dtype = weights.shape(name), weights.dtype(name)
            if expectation.cache_algo is None:
                what = f"is there, but {expectation.source} declares no quantization of the cache"
                yield fault(("cache scale", "undeclared"), what=what)
            elif name == _tensor(attention, part) and attention not in with_weights:
                yield fault(("cache scale", "of nothing"), what=f"scales nothing: {attention} has no weight")
            elif dtype != torch.float32 or shape not in SCALAR_SHAPES:
                what = f"is {type_name(dtype)} {list(shape)}; it must be float32 []"
                yield fault(("cache scale", "type"), what=what)
    if expectation.cache_algo is not None:
        yield from _missing(weights, layers, found, expectation)


def _missing(
    weights: Weights, layers: Sequence[Layer], found: dict[str, dict[str, str]], expectation: Expectation
) -> Iterator[Fault]:
    examples = {_kind(attention): next(iter(scales.values())) for attention, scales in found.items()}
    tensors = {_attention(layer): layer.weight for layer in layers if layer.weight and _PROJECTION.search(layer.module)}
    for attention in dict.fromkeys([*tensors, *found]):
        scales = found.get(attention, {})
        example = next(iter(scales.values()), examples.get(_kind(attention)))
        for part in CACHE_SCALES:
            if example is not None and part not in scales:
                file = weights.file_of(tensors.get(attention) or example)
                declared = f"{expectation.source} declares {expectation.cache_algo} caches"
                what = f"is missing; {declared}, and {example} is there"
                yield Fault(("cache scale", part, "missing"), file, _tensor(attention, part), what)


def _attention(layer: Layer) -> str:
    """The module that holds the projections; the layer's own where the scale is not at a projection."""
    return _PROJECTION.sub("", layer.module)


def _tensor(attention: str, part: str) -> str:
    return f"{attention}.{part[0]}_proj.{part}"


def _kind(attention: str) -> str:
    """What the attentions of all layers have in common: their name without numbers."""
    return _NUMBER.sub("*", attention)
