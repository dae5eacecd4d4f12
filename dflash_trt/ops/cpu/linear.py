"""Linear layers: x [M, K] in float32 times the transpose of a weight [N, K] in any format.

Lane l of an output's partial sums has the products of k = l, l + lanes, ... in that order, fused; then halves of the
lanes are added until one number is left. So a row's bits do not depend on the other rows or on threads. Weights are
read once from memory: a unit of work is some of their rows, for all rows of x.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.cpu.formats import E2M1_EXPONENT, E4M3_EXPONENT, FLOATS, E4M3Row, FloatRow, NVFP4Row, Row
from dflash_trt.ops.cpu.kernel import F32, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import (
    WIDTH,
    fma,
    lanes,
    registers,
    slices,
    splat,
    store,
    tail_mask,
    total,
)
from dflash_trt.quantization.fp8 import FP8Tensor
from dflash_trt.quantization.nvfp4 import NVFP4Tensor

_UNIT = 48
"""Rows of a weight in a unit of work: a multiple of what tiles of any size have of them."""
_UNIT_BYTES = 1 << 18
"""Of a unit in float32, beyond which it is halved: half of a second-level cache."""
_SMALL = 1 << 15
"""Products that one thread is done with before another one is awake; torch's own grain."""
_NVFP4 = "nvfp4"
_M, _N, _K, _X, _WEIGHT, _STRIDE, _SCALES, _SCALE_STRIDE, _OUT, _SCRATCH, _STEP, _FACTOR, _FACTOR_2 = range(2, 15)


def linear(x: Tensor, weight: Tensor | FP8Tensor | NVFP4Tensor, input_scale: Tensor | None = None) -> Tensor:
    """Sums in float32 [..., N] of x [..., K], float32, and a contiguous weight.

    Args:
        input_scale: what sums are multiplied by beside the weight's own scale: float32 scalar.
    """
    x = x.contiguous()
    features = x.shape[-1]
    scales = factor = None
    held: Tensor
    kind: torch.dtype | str
    if isinstance(weight, NVFP4Tensor):
        kind, held, scales, factor = _NVFP4, weight.weight, weight.weight_scale, weight.weight_scale_2
    elif isinstance(weight, FP8Tensor):
        kind, (held, factor) = weight.weight.dtype, weight
    else:
        kind, held = weight.dtype, weight
    out_features = held.shape[0]
    out = torch.empty(*x.shape[:-1], out_features)
    rows = x.numel() // features
    threads = 1 if out_features * features < _SMALL else torch.get_num_threads()
    step = _UNIT if _UNIT * features * 4 <= _UNIT_BYTES else _UNIT // 2
    decodes = rows > 1 and kind != torch.float32
    _kernel(kind, features % WIDTH > 0)(
        threads,
        rows,
        out_features,
        features,
        x.data_ptr(),
        held.data_ptr(),
        held.stride(0) * held.itemsize,
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0),
        out.data_ptr(),
        _scratch(threads * step * _padded(features)) if decodes else 0,
        step,
        0 if factor is None else factor.data_ptr(),
        0 if input_scale is None else input_scale.data_ptr(),
    )
    return out


_LOCAL = threading.local()


def _scratch(floats: int) -> int:
    """Where the calling thread's kernels decode weights to; grows to the largest layer."""
    held: Tensor | None = getattr(_LOCAL, "scratch", None)
    if held is None or held.numel() < floats:
        held = _LOCAL.scratch = torch.empty(floats)
    return held.data_ptr()


def _padded(features: int) -> int:
    return -(-features // WIDTH) * WIDTH


@cache
def _kernel(kind: torch.dtype | str, uneven: bool) -> Kernel:
    """For features that are no multiple of 16, or for those that are."""
    return compiled(lambda e: _Linear(e, kind, uneven).write(), f"linear_{kind}".replace("torch.", ""))


class _Linear:
    def __init__(self, e: Emitter, kind: torch.dtype | str, uneven: bool) -> None:
        self.e, self.kind, self.uneven = e, kind, uneven
        self.rows, self.out_features, self.features = (e.argument(index) for index in (_M, _N, _K))
        self.x, self.weight, self.scales, self.out = (e.pointer(index) for index in (_X, _WEIGHT, _SCALES, _OUT))
        self.stride, self.scale_stride = e.argument(_STRIDE), e.argument(_SCALE_STRIDE)
        self.whole = e.b.and_(self.features, e.i64(-WIDTH))
        self.row_bytes = e.b.mul(self.features, e.i64(4))

    def write(self) -> None:
        e = self.e
        self.scale = self._scale()
        thread = e.count(1, e.i64(1))
        step = e.argument(_STEP)
        with e.units(step, self.out_features) as (first, end):
            alone = e.b.icmp_signed("==", self.rows, e.i64(1))
            with e.b.if_else(alone) as (one, many):
                with one:
                    self._tiles(self.weight_row, first, end, e.i64(0), 1)
                with many:
                    self._many(first, end, e.b.mul(thread, step))

    def weight_row(self, n: Value) -> Row:
        """Row n of the weight where it lies."""
        address = self.e.at(self.weight, self.e.b.mul(n, self.stride))
        if self.kind == _NVFP4:
            return NVFP4Row(address, self.e.at(self.scales, self.e.b.mul(n, self.scale_stride)))
        return E4M3Row(address) if self.kind == torch.float8_e4m3fn else FLOATS[self.kind](address)  # type: ignore[index]

    def _many(self, first: Value, end: Value, scratch_row: Value) -> None:
        """All rows of x, with weights decoded once for all of them."""
        e = self.e
        weight_row: Callable[[Value], Row] = self.weight_row
        if self.kind != torch.float32:
            padded = e.b.and_(e.b.add(self.features, e.i64(WIDTH - 1)), e.i64(-WIDTH))
            row_bytes = e.b.mul(padded, e.i64(4))
            base = e.at(e.pointer(_SCRATCH), e.b.mul(e.b.sub(scratch_row, first), row_bytes))

            def decoded(n: Value) -> FloatRow:
                return FloatRow(e.at(base, e.b.mul(n, row_bytes)))

            with e.loop(first, end, e.i64(1)) as n:
                source, target = self.weight_row(n), decoded(n)
                for start, mask in self._chunks():
                    store(e, source.read(e, start, mask), e.at(target.address, start, 4))
            weight_row = decoded
        with e.loop(e.i64(0), e.b.and_(self.rows, e.i64(-4)), e.i64(4)) as m:
            self._tiles(weight_row, first, end, m, 4)
        left = e.b.and_(self.rows, e.i64(3))
        m = e.b.sub(self.rows, left)
        with e.b.if_then(e.b.icmp_signed("==", left, e.i64(3))):
            self._tiles(weight_row, first, end, m, 4)
        with e.b.if_then(e.b.icmp_unsigned("<", e.b.sub(left, e.i64(1)), e.i64(2))):
            self._tiles(weight_row, first, end, m, 2)

    def _tiles(self, weight_row: Callable[[Value], Row], first: Value, end: Value, m: Value, rows: int) -> None:
        """Rows m..m + rows - 1 of x times rows first..end - 1 of the weight.

        Where a tile reaches past the last row of either, that row is taken again.
        """
        e, columns = self.e, _columns(rows)
        places = [e.smaller(e.b.add(m, e.i64(row)), e.b.sub(self.rows, e.i64(1))) for row in range(rows)]
        last = e.b.sub(end, e.i64(1))
        with e.loop(first, end, e.i64(columns)) as n:
            columns_ = [e.smaller(e.b.add(n, e.i64(column)), last) for column in range(columns)]
            self._tile(weight_row, columns_, places)

    def _tile(self, weight_row: Callable[[Value], Row], columns: list[Value], places: list[Value]) -> None:
        e = self.e
        weights = [weight_row(column) for column in columns]
        inputs = [FloatRow(e.at(self.x, e.b.mul(place, self.row_bytes))) for place in places]
        zero = splat(e, F32(0.0), lanes())
        sums = [[e.variable(zero) for _ in weights] for _ in inputs]
        for start, mask in self._chunks():
            parts = [slices(e, weight.read(e, start, mask)) for weight in weights]
            for row, input_ in zip(sums, inputs, strict=True):
                x = slices(e, input_.read(e, start, mask))
                for sum_, part in zip(row, parts, strict=True):
                    value = e.b.load(sum_)
                    for a, b in zip(x, part, strict=True):
                        value = fma(e, a, b, value)
                    e.b.store(value, sum_)
        for row, place in zip(sums, places, strict=True):
            out = e.at(self.out, e.b.mul(place, self.out_features), 4)
            for column, sum_ in zip(columns, row, strict=True):
                e.store(e.b.fmul(total(e, e.b.load(sum_)), self.scale), e.at(out, column, 4))

    def _chunks(self) -> Iterator[tuple[Value, Value | None]]:
        """Starts of 16 columns, and which of them there are where not all."""
        e = self.e
        with e.loop(e.i64(0), self.whole, e.i64(WIDTH)) as start:
            yield start, None
        if self.uneven:
            yield self.whole, tail_mask(e, e.b.sub(self.features, self.whole))

    def _scale(self) -> Value:
        """What sums are multiplied by."""
        e = self.e
        if self.kind != _NVFP4 and self.kind != torch.float8_e4m3fn:
            return F32(1.0)
        exponent = E4M3_EXPONENT + (E2M1_EXPONENT if self.kind == _NVFP4 else 0)
        scale = e.variable(e.load(e.pointer(_FACTOR), F32))
        with e.b.if_then(e.b.icmp_signed("!=", e.argument(_FACTOR_2), e.i64(0))):
            e.b.store(e.b.fmul(e.b.load(scale), e.load(e.pointer(_FACTOR_2), F32)), scale)
        return e.b.fmul(e.b.load(scale), F32(2.0**-exponent))


def _columns(rows: int) -> int:
    """Rows of a weight in a tile with so many of x: as many sums as registers hold beside what is multiplied."""
    if rows == 1:
        return 8
    return {16: 12, 32: 24}[registers()] // rows
