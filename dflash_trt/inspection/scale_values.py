"""Scales that make infinities, NaN or zeros of what they scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from dflash_trt.checkpoint.weights import Weights
from dflash_trt.inspection.faults import Fault
from dflash_trt.inspection.layers import Layer
from dflash_trt.quantization.fp8 import decode_e4m3
from dflash_trt.quantization.mxfp4 import decode_e8m0

Progress = Callable[[int, int], None]
"""Told how many of how many scales have been read."""


def nothing(done: int, total: int) -> None:
    """The `Progress` that nobody watches."""


_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_SCALE_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, *_E8M0)


def value_faults(weights: Weights, layers: Sequence[Layer], positive: bool, progress: Progress) -> Iterator[Fault]:
    """Scales that are not finite and, where `positive`, those that are not above zero."""
    scales = [item for layer in layers for item in layer.scales.items() if weights.dtype(item[1]) in _SCALE_TYPES]
    for done, (part, name) in enumerate(scales):
        progress(done, len(scales))
        tensor = weights.read(name)
        if _is_sound(tensor):
            continue
        for kind, count in _unsound(tensor).items():
            if count and (positive or kind == "not finite"):
                what = f"is {tensor.item():g}" if tensor.numel() == 1 else f"has {count} of {tensor.numel()} {kind}"
                needs = f"; a scale must be {'positive and ' if positive else ''}finite"
                yield Fault((part, kind), weights.file_of(name), name, what + needs)


def _is_sound(scales: torch.Tensor) -> bool:
    """All are positive and finite. Makes no copy: a large model has gigabytes of block scales."""
    if scales.numel() == 0:
        return True
    if scales.dtype in (torch.float8_e4m3fn, *_E8M0):
        low, high = (bound.item() for bound in torch.aminmax(scales.view(torch.uint8)))
        # In order of their codes: e4m3 has its positive values from 1 to 126, e8m0 its only NaN at 255.
        return low >= 1 and high <= 126 if scales.dtype == torch.float8_e4m3fn else high < 255
    low, high = (bound.item() for bound in torch.aminmax(scales))
    return low > 0 and high < math.inf


def _unsound(scales: torch.Tensor) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in torch.split(scales.flatten(), 1 << 20):
        values = _decoded(part)
        counts["not finite"] += int((~torch.isfinite(values)).sum())
        counts["zero"] += int((values == 0).sum())
        counts["negative"] += int(((values < 0) & torch.isfinite(values)).sum())
    return counts


def _decoded(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.float8_e4m3fn:
        return decode_e4m3(scales)
    return decode_e8m0(scales) if scales.dtype in _E8M0 else scales
