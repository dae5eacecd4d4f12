"""Rotary embedding of heads, and their way into a cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.base import LayerCache, RotaryTable, Span
from dflash_trt.ops.cpu.formats import FLOATS, STORED, Row
from dflash_trt.ops.cpu.kernel import F32, I64, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import chunks, fma, splat, total

_SMALL = 1 << 15
"""Numbers that one thread is done with before another one is awake; torch's own grain."""
_BATCH, _HEADS, _ROWS = range(2, 5)
_X, _X_BATCH, _X_HEAD, _X_ROW, _COS, _SIN, _OUT = range(5, 12)
_KEYS, _VALUES, _K_BATCH, _K_HEAD, _K_ROW, _V_BATCH, _V_HEAD, _V_ROW, _KEY_CACHE, _VALUE_CACHE = range(5, 15)
_SLOT, _HEAD, _SLOTS, _POSITIONS, _KEY_SCALE, _VALUE_SCALE = range(15, 21)


def rotary_embedding(x: Tensor, rows: RotaryTable) -> Tensor:
    """x [B, H, T, d] rotated, in float32 and rounded once: pairs (i, i + d / 2), angles [B, T, d / 2] of x's type."""
    batch, heads, count, size = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(batch, count, heads, size, dtype=x.dtype)
    _rotary_kernel(x.dtype, size)(
        _threads(x), batch, heads, count, x.data_ptr(), *x.stride()[:3], rows.cos.data_ptr(), rows.sin.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    return out.transpose(1, 2)


def write_cache(cache: LayerCache, keys: Tensor, values: Tensor, span: Span) -> None:
    """Keys and values [B, KV heads, T, d] to the span's rows of a cache of their type, or one of FP8 with its scales.

    Where a head's are not finite, its key becomes NaN and its value zero.
    """
    batch, heads, count, size = keys.shape
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    scales = (0 if scale is None else scale.data_ptr() for scale in (cache.key_scale, cache.value_scale))
    _cache_kernel(keys.dtype, cache.keys.dtype, size)(
        _threads(keys), batch, heads, count, keys.data_ptr(), values.data_ptr(), *keys.stride()[:3],
        *values.stride()[:3], cache.keys.data_ptr(), cache.values.data_ptr(), *cache.keys.stride()[:2],
        span.slots.data_ptr(), span.positions.data_ptr(), *scales,
    )  # fmt: skip


def _threads(x: Tensor) -> int:
    return 1 if x.numel() < _SMALL else torch.get_num_threads()


@cache
def _rotary_kernel(dtype: torch.dtype, size: int) -> Kernel:
    return compiled(lambda e: _write_rotary(e, dtype, size), f"rotary_{dtype}_{size}".replace("torch.", ""))


@cache
def _cache_kernel(dtype: torch.dtype, cached: torch.dtype, size: int) -> Kernel:
    name = f"cache_{dtype}_{cached}_{size}".replace("torch.", "")
    return compiled(lambda e: _write_cache(e, dtype, cached, size), name)


def _write_rotary(e: Emitter, dtype: torch.dtype, size: int) -> None:
    held, half, bytes_ = FLOATS[dtype], size // 2, dtype.itemsize
    heads, count = e.argument(_HEADS), e.argument(_ROWS)
    rows = e.b.mul(e.argument(_BATCH), count)
    with e.units(e.i64(8), rows) as (first, end), e.loop(first, end, e.i64(1)) as row:
        sequence, t = e.b.sdiv(row, count), e.b.srem(row, count)
        cos, sin = (held(e.at(e.pointer(index), row, half * bytes_)) for index in (_COS, _SIN))
        with e.loop(e.i64(0), heads, e.i64(1)) as head:
            x = e.at(e.pointer(_X), _offset(e, (sequence, head, t), _X_BATCH), bytes_)
            out = e.at(e.pointer(_OUT), e.b.add(e.b.mul(row, heads), head), size * bytes_)
            low, high = held(x), held(e.at(x, e.i64(half), bytes_))
            for start, mask in chunks(e, half):
                a, b, c, s = (part.read(e, start, mask) for part in (low, high, cos, sin))
                held(out).write(e, start, fma(e, a, c, e.b.fneg(e.b.fmul(b, s))), mask)
                held(e.at(out, e.i64(half), bytes_)).write(e, start, fma(e, b, c, e.b.fmul(a, s)), mask)


def _write_cache(e: Emitter, dtype: torch.dtype, cached: torch.dtype, size: int) -> None:
    given, bytes_, cached_bytes = FLOATS[dtype], dtype.itemsize, cached.itemsize
    divisors = [None, None]
    if cached != dtype:
        divisors = [splat(e, e.load(e.pointer(index), F32)) for index in (_KEY_SCALE, _VALUE_SCALE)]
    heads, count = e.argument(_HEADS), e.argument(_ROWS)
    with e.units(e.i64(8), e.b.mul(e.argument(_BATCH), count)) as (first, end), e.loop(first, end, e.i64(1)) as row:
        sequence, t = e.b.sdiv(row, count), e.b.srem(row, count)
        slot = e.load(e.at(e.pointer(_SLOTS), sequence, 8), I64)
        position = e.load(e.at(e.pointer(_POSITIONS), row, 8), I64)
        with e.loop(e.i64(0), heads, e.i64(1)) as head:
            place = e.b.add(e.b.mul(slot, e.argument(_SLOT)), e.b.mul(head, e.argument(_HEAD)))
            place = e.b.add(place, e.b.mul(position, e.i64(size)))
            key = given(e.at(e.pointer(_KEYS), _offset(e, (sequence, head, t), _K_BATCH), bytes_))
            value = given(e.at(e.pointer(_VALUES), _offset(e, (sequence, head, t), _V_BATCH), bytes_))
            zero = splat(e, F32(0.0))
            mark = _mark(e, (key, value), size)
            is_finite = e.b.fcmp_ordered("==", mark, zero)
            for part, lost, divisor, index in (
                (key, mark, divisors[0], _KEY_CACHE),
                (value, zero, divisors[1], _VALUE_CACHE),
            ):
                out = STORED[cached](e.at(e.pointer(index), place, cached_bytes))
                for start, mask in chunks(e, size):
                    x = part.read(e, start, mask)
                    x = x if divisor is None else e.b.fdiv(x, divisor)
                    out.write(e, start, e.b.select(is_finite, x, lost), mask)


def _mark(e: Emitter, parts: Sequence[Row], size: int) -> Value:
    """Zero, or NaN where one of the rows is not finite, 16 times."""
    zero = splat(e, F32(0.0))
    sums = e.variable(zero)
    for start, mask in chunks(e, size):
        for part in parts:
            e.b.store(fma(e, part.read(e, start, mask), zero, e.b.load(sums)), sums)
    return splat(e, total(e, e.b.load(sums)))


def _offset(e: Emitter, places: tuple[Value, Value, Value], first: int) -> Value:
    """Of sequence, head and row, by the three strides from argument `first` on."""
    offset = e.i64(0)
    for index, place in enumerate(places):
        offset = e.b.add(offset, e.b.mul(place, e.argument(first + index)))
    return offset
