"""RMS norm of rows, each by itself."""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.cpu.formats import FLOATS
from dflash_trt.ops.cpu.kernel import F32, I32, Emitter, Kernel, compiled
from dflash_trt.ops.cpu.vector import WIDTH, chunks, fma, splat, total

_ROWS, _X, _WEIGHT, _EPS, _OUT = range(2, 7)
_UNIT = 8
"""Rows that a thread takes at once."""
_SMALL = 1 << 15
"""Numbers that one thread is done with before another one is awake; torch's own grain."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 and rounded once; weight of x's type."""
    x = x.contiguous()
    out = torch.empty_like(x)
    count, size = x.numel(), x.shape[-1]
    threads = 1 if count < _SMALL else torch.get_num_threads()
    _kernel(x.dtype, size)(threads, count // size, x.data_ptr(), weight.data_ptr(), _bits(eps), out.data_ptr())
    return out


@cache
def _bits(number: float) -> int:
    """Of a float32 number."""
    return int(struct.unpack("i", struct.pack("f", number))[0])


@cache
def _kernel(dtype: torch.dtype, size: int) -> Kernel:
    return compiled(lambda e: _write(e, dtype, size), f"rms_norm_{dtype}_{size}".replace("torch.", ""))


def _write(e: Emitter, dtype: torch.dtype, size: int) -> None:
    held = FLOATS[dtype]
    eps = e.b.bitcast(e.b.trunc(e.argument(_EPS), I32), F32)
    weight = held(e.pointer(_WEIGHT))
    with e.units(e.i64(_UNIT), e.argument(_ROWS)) as (first, end), e.loop(first, end, e.i64(1)) as row:
        x = held(e.at(e.pointer(_X), row, size * dtype.itemsize))
        out = held(e.at(e.pointer(_OUT), row, size * dtype.itemsize))
        squares = e.variable(splat(e, F32(0.0), WIDTH))
        for start, mask in chunks(e, size):
            value = x.read(e, start, mask)
            e.b.store(fma(e, value, value, e.b.load(squares)), squares)
        mean = e.b.fdiv(total(e, e.b.load(squares)), F32(float(size)))
        root = e.call("llvm.sqrt.f32", e.b.fadd(mean, eps))
        factor = splat(e, e.b.fdiv(F32(1.0), root))
        for start, mask in chunks(e, size):
            value = e.b.fmul(e.b.fmul(x.read(e, start, mask), factor), weight.read(e, start, mask))
            out.write(e, start, value, mask)
