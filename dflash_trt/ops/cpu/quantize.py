"""Activations rounded to what a quantized layer multiplies: `encode_fp8` and `fake_quantize_nvfp4` in one pass each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.cpu.formats import FLOATS, FloatRow, to_e2m1, to_e4m3
from dflash_trt.ops.cpu.kernel import F32, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import elementwise, fabs, larger, maximum, smaller, splat
from dflash_trt.quantization.e2m1 import E2M1_MAX
from dflash_trt.quantization.fp8 import E4M3_MAX

_COUNT, _X, _SCALE, _OUT = range(2, 6)
_SMALL = 1 << 13
"""Numbers that one thread is done with before another one is awake."""
_LEAST = 2.0**-149

Rounding = Callable[[Emitter, Value, Value], Value]
"""16 numbers, and the scale of the tensor 16 times, to 16 numbers."""


def rounded_to_fp8(x: Tensor, input_scale: Tensor) -> Tensor:
    """e4m3(clip(x / input_scale, -448, 448)) in float32, of x's shape; NaN stays NaN."""
    return _run(_fp8_kernel(x.dtype), x, input_scale)


def rounded_to_nvfp4(x: Tensor, input_scale: Tensor) -> Tensor:
    """`fake_quantize_nvfp4` in float32: x [..., in], in % 16 == 0."""
    return _run(_nvfp4_kernel(x.dtype), x, input_scale)


def _run(kernel: Kernel, x: Tensor, input_scale: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    threads = 1 if x.numel() < _SMALL else torch.get_num_threads()
    kernel(threads, x.numel(), x.data_ptr(), input_scale.data_ptr(), out.data_ptr())
    return out


@cache
def _fp8_kernel(dtype: torch.dtype) -> Kernel:
    return compiled(lambda e: _write(e, dtype, _fp8), f"to_fp8_{dtype}".replace("torch.", ""))


@cache
def _nvfp4_kernel(dtype: torch.dtype) -> Kernel:
    return compiled(lambda e: _write(e, dtype, _nvfp4), f"to_nvfp4_{dtype}".replace("torch.", ""))


def _write(e: Emitter, dtype: torch.dtype, rounding: Rounding) -> None:
    x, out = FLOATS[dtype](e.pointer(_X)), FloatRow(e.pointer(_OUT))
    scale = splat(e, e.load(e.pointer(_SCALE), F32))

    def write(start: Value, mask: Value | None) -> None:
        out.write(e, start, rounding(e, x.read(e, start, mask), scale), mask)

    elementwise(e, e.argument(_COUNT), write)


def _fp8(e: Emitter, x: Value, scale: Value) -> Value:
    return to_e4m3(e, e.b.fdiv(x, scale))


def _nvfp4(e: Emitter, x: Value, scale: Value) -> Value:
    """The 16 numbers are a block."""
    amax = splat(e, maximum(e, fabs(e, x)))
    block_scale = to_e4m3(e, smaller(e, e.b.fdiv(amax, e.b.fmul(scale, splat(e, F32(E2M1_MAX)))), E4M3_MAX))
    factor = e.b.fmul(block_scale, scale)
    return e.b.fmul(to_e2m1(e, e.b.fdiv(x, larger(e, factor, _LEAST))), factor)
