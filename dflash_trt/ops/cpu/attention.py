"""Attention of rows over their slots of a cache, which is read where it lies.

Keys are taken in tiles of 64 that begin at multiples of 64, one after another, with a running maximum and sum: the
online softmax of FlashAttention. A row's tiles follow from its own position, so its bits do not depend on other rows.
Keys and values that a row does not see have no part in it.
"""

from __future__ import annotations

import math
import threading
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.base import LayerCache, Span
from dflash_trt.ops.cpu.formats import E4M3_EXPONENT, STORED, FloatRow, Row
from dflash_trt.ops.cpu.kernel import F32, I32, I64, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import (
    WIDTH,
    chunks,
    exp,
    fma,
    lanes,
    larger_of,
    maximum,
    slices,
    splat,
    total,
)

_TILE = 64
"""Keys, which stay in a first-level cache for all rows of a unit."""
_ROWS = 16
"""Of a sequence in a unit of work, which shares tiles of keys among them and their heads."""
_KEYS = 8
"""That are multiplied with a query at once."""
_VALUES = 4
"""Vectors of `WIDTH` columns that are summed at once."""
_UNLIMITED = 1 << 40
"""A window past the end of any cache."""
_SMALL = 1 << 15
"""Products that one thread is done with before another one is awake; torch's own grain."""
_LOCAL = threading.local()
(
    _BATCH, _T, _GROUPS, _HEADS, _Q, _Q_BATCH, _Q_HEAD, _Q_ROW, _K, _V, _SLOT, _HEAD, _SLOTS, _POSITIONS, _CAUSAL,
    _WINDOW, _K_SCALE, _V_SCALE, _OUT, _SCRATCH, _SCRATCH_FLOATS, _BLOCKS,
) = range(2, 24)  # fmt: skip


def attention(q: Tensor, cache: LayerCache, span: Span, *, causal: bool, window: int | None) -> Tensor:
    """softmax(q k / sqrt(d)) v over the keys that `Ops.attention_mask` describes: float32 [B, H, T, d], as q is."""
    batch, heads, rows, size = q.shape
    kv_heads = cache.keys.shape[1]
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(batch, rows, heads, size)
    blocks = -(-rows // _ROWS)
    threads = 1 if batch * heads * rows * size * span.extent < _SMALL else torch.get_num_threads()
    floats = _scratch_floats(min(rows, _ROWS) * (heads // kv_heads), size)
    scales = (cache.key_scale, cache.value_scale)
    _kernel(cache.keys.dtype, size)(
        threads,
        batch,
        rows,
        heads // kv_heads,
        kv_heads,
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        q.stride(2),
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        cache.keys.stride(0),
        cache.keys.stride(1),
        span.slots.data_ptr(),
        span.positions.data_ptr(),
        causal,
        _UNLIMITED if window is None else window,
        *(0 if scale is None else scale.data_ptr() for scale in scales),
        out.data_ptr(),
        _scratch(threads * floats),
        floats,
        blocks,
    )
    return out.transpose(1, 2)


def _padded(size: int) -> int:
    return -(-size // WIDTH) * WIDTH


def _scratch_floats(rows: int, size: int) -> int:
    """Of a thread: scores, a tile of keys and one of values, and of each row its sums, maximum and divisor."""
    return _TILE + 2 * _TILE * _padded(size) + rows * (_padded(size) + 2)


def _scratch(floats: int) -> int:
    held: Tensor | None = getattr(_LOCAL, "scratch", None)
    if held is None or held.numel() < floats:
        held = _LOCAL.scratch = torch.empty(floats)
    return held.data_ptr()


@cache
def _kernel(dtype: torch.dtype, size: int) -> Kernel:
    return compiled(lambda e: _Attention(e, dtype, size).write(), f"attention_{dtype}_{size}".replace("torch.", ""))


class _Attention:
    def __init__(self, e: Emitter, dtype: torch.dtype, size: int) -> None:
        self.e, self.dtype, self.size, self.padded = e, dtype, size, _padded(size)
        self.copies = dtype != torch.float32 or self.padded > size
        self.rows, self.groups, self.heads = e.argument(_T), e.argument(_GROUPS), e.argument(_HEADS)
        self.positions, self.out = e.pointer(_POSITIONS), e.pointer(_OUT)
        self.causal = e.b.icmp_signed("!=", e.argument(_CAUSAL), e.i64(0))
        self.window = e.argument(_WINDOW)

    def write(self) -> None:
        """A unit is up to `_ROWS` rows of a sequence and all heads that share a head of its cache."""
        e = self.e
        thread = e.count(1, e.i64(1))
        self.scores = e.at(e.pointer(_SCRATCH), e.b.mul(thread, e.argument(_SCRATCH_FLOATS)), 4)
        self.key_tile = e.at(self.scores, e.i64(_TILE), 4)
        self.value_tile = e.at(self.key_tile, e.i64(_TILE * self.padded), 4)
        self.state = e.at(self.value_tile, e.i64(_TILE * self.padded), 4)
        self.score_scale = e.b.fmul(self._scale(_K_SCALE), F32(1 / math.sqrt(self.size)))
        blocks = e.argument(_BLOCKS)
        per_sequence = e.b.mul(blocks, self.heads)
        with e.units(e.i64(1), e.b.mul(per_sequence, e.argument(_BATCH))) as (unit, _):
            self.sequence, rest = e.b.sdiv(unit, per_sequence), e.b.srem(unit, per_sequence)
            self.head = e.b.sdiv(rest, blocks)
            first = e.b.mul(e.b.srem(rest, blocks), e.i64(_ROWS))
            self._unit(first, e.smaller(e.b.add(first, e.i64(_ROWS)), self.rows))

    def _unit(self, first: Value, end: Value) -> None:
        e = self.e
        with e.loop(e.i64(0), e.b.mul(e.b.sub(end, first), self.groups), e.i64(1)) as row:
            sums, most, divisor = self._state(row)
            for place in range(0, self.padded, WIDTH):
                sums.write(e, e.i64(place), splat(e, F32(0.0)))
            e.store(F32(float("-inf")), most)
            e.store(F32(0.0), divisor)
        low, _ = self._visible(first)
        _, high = self._visible(e.b.sub(end, e.i64(1)))
        with e.loop(e.b.and_(low, e.i64(-_TILE)), high, e.i64(_TILE)) as tile:
            tile_end = e.b.add(tile, e.i64(_TILE))
            keys = self._tile(_K, self.key_tile, tile, e.larger(low, tile), e.smaller(high, tile_end))
            values = self._tile(_V, self.value_tile, tile, e.larger(low, tile), e.smaller(high, tile_end))
            with e.loop(first, end, e.i64(1)) as t:
                row_low, row_high = self._visible(t)
                a, z = e.larger(row_low, tile), e.smaller(row_high, tile_end)
                with e.b.if_then(e.b.icmp_signed("<", a, z)), e.loop(e.i64(0), self.groups, e.i64(1)) as group:
                    row = e.b.add(e.b.mul(e.b.sub(t, first), self.groups), group)
                    self._row(self._query(t, group), row, keys, values, e.b.sub(a, tile), e.b.sub(z, tile))
        scale = self._scale(_V_SCALE)
        with e.loop(first, end, e.i64(1)) as t, e.loop(e.i64(0), self.groups, e.i64(1)) as group:
            sums, _, divisor = self._state(e.b.add(e.b.mul(e.b.sub(t, first), self.groups), group))
            factor = splat(e, e.b.fdiv(scale, e.load(divisor, F32)))
            place = e.b.add(e.b.mul(self.sequence, self.rows), t)
            place = e.b.add(e.b.mul(place, e.b.mul(self.heads, self.groups)), self._head_of(group))
            out = FloatRow(e.at(self.out, place, 4 * self.size))
            for start, mask in chunks(e, self.size):
                out.write(e, start, e.b.fmul(sums.read(e, start), factor), mask)

    def _row(self, query: Row, row: Value, keys: FloatRow, values: FloatRow, first: Value, end: Value) -> None:
        """Keys first..end - 1 of a tile to a row's sums."""
        e = self.e
        scores = FloatRow(self.scores)
        places = [e.i64(place) for place in range(0, _TILE, WIDTH)]
        for place in places:
            scores.write(e, place, splat(e, F32(float("-inf"))))
        last = e.b.sub(end, e.i64(1))
        with e.loop(first, end, e.i64(_KEYS)) as j:
            self._multiply(query, keys, [e.smaller(e.b.add(j, e.i64(i)), last) for i in range(_KEYS)])
        sums, most, divisor = self._state(row)
        before = e.load(most, F32)
        now = maximum(e, larger_of(e, [scores.read(e, place) for place in places]))
        now = e.call("llvm.maximum.f32", before, now)
        fading = e.b.extract_element(exp(e, splat(e, e.b.fsub(before, now), lanes())), I32(0))
        parts = [exp(e, e.b.fsub(scores.read(e, place), splat(e, now))) for place in places]
        for place, part in zip(places, parts, strict=True):
            scores.write(e, place, part)
        sum_ = e.b.fadd(e.b.fadd(parts[0], parts[1]), e.b.fadd(parts[2], parts[3]))
        e.store(now, most)
        e.store(e.call("llvm.fma.f32", e.load(divisor, F32), fading, total(e, sum_)), divisor)
        for start in range(0, self.padded, WIDTH * _VALUES):
            columns = [e.i64(place) for place in range(start, min(start + WIDTH * _VALUES, self.padded), WIDTH)]
            self._add(sums, fading, values, columns, first, end)

    def _multiply(self, query: Row, keys: FloatRow, places: list[Value]) -> None:
        """The scores of some keys of a tile."""
        e = self.e
        rows = [self._tile_row(keys, place) for place in places]
        dots = [e.variable(splat(e, F32(0.0), lanes())) for _ in rows]
        for start, mask in chunks(e, self.size):
            q = slices(e, query.read(e, start, mask))
            for dot, key in zip(dots, rows, strict=True):
                value = e.b.load(dot)
                for a, b in zip(q, slices(e, key.read(e, start)), strict=True):
                    value = fma(e, a, b, value)
                e.b.store(value, dot)
        for dot, place in zip(dots, places, strict=True):
            e.store(e.b.fmul(total(e, e.b.load(dot)), self.score_scale), e.at(self.scores, place, 4))

    def _add(
        self, sums: FloatRow, fading: Value, values: FloatRow, columns: list[Value], first: Value, end: Value
    ) -> None:
        """Some columns of a row's sums, faded, and those of the tile's values by their weights."""
        e = self.e
        kept = [e.variable(e.b.fmul(sums.read(e, column), splat(e, fading))) for column in columns]
        with e.loop(first, end, e.i64(1)) as j:
            weight = splat(e, e.load(e.at(self.scores, j, 4), F32))
            value = self._tile_row(values, j)
            for sum_, column in zip(kept, columns, strict=True):
                e.b.store(fma(e, weight, value.read(e, column), e.b.load(sum_)), sum_)
        for sum_, column in zip(kept, columns, strict=True):
            sums.write(e, column, e.b.load(sum_))

    def _tile(self, which: int, scratch: Value, tile: Value, first: Value, end: Value) -> FloatRow:
        """Rows of a tile in float32: where they lie, or first..end - 1 of the cache copied."""
        e = self.e
        slot = e.load(e.at(e.pointer(_SLOTS), self.sequence, 8), I64)
        head = e.b.add(e.b.mul(slot, e.argument(_SLOT)), e.b.mul(self.head, e.argument(_HEAD)))
        base = e.at(e.pointer(which), head, self.dtype.itemsize)
        if not self.copies:
            return FloatRow(e.at(base, tile, 4 * self.size))
        held = STORED[self.dtype]
        with e.loop(first, end, e.i64(1)) as j:
            source = held(e.at(base, j, self.size * self.dtype.itemsize))
            target = self._tile_row(FloatRow(scratch), e.b.sub(j, tile))
            for start, mask in chunks(e, self.size):
                target.write(e, start, source.read(e, start, mask))
        return FloatRow(scratch)

    def _tile_row(self, tile: FloatRow, place: Value) -> FloatRow:
        return FloatRow(self.e.at(tile.address, place, 4 * (self.padded if self.copies else self.size)))

    def _visible(self, t: Value) -> tuple[Value, Value]:
        """The first key that row t of the sequence sees, and the one past the last."""
        e = self.e
        start = e.b.mul(self.sequence, self.rows)
        position = e.load(e.at(self.positions, e.b.add(start, t), 8), I64)
        last = e.load(e.at(self.positions, e.b.add(start, e.b.sub(self.rows, e.i64(1))), 8), I64)
        past = e.b.add(position, e.i64(1))
        low = e.larger(e.b.sub(past, self.window), e.i64(0))
        ahead = e.smaller(e.b.add(position, self.window), e.b.add(last, e.i64(1)))
        return low, e.b.select(self.causal, past, ahead)

    def _head_of(self, group: Value) -> Value:
        return self.e.b.add(self.e.b.mul(self.head, self.groups), group)

    def _query(self, t: Value, group: Value) -> FloatRow:
        e = self.e
        places = ((self.sequence, _Q_BATCH), (self._head_of(group), _Q_HEAD), (t, _Q_ROW))
        offset = e.i64(0)
        for place, stride in places:
            offset = e.b.add(offset, e.b.mul(place, e.argument(stride)))
        return FloatRow(e.at(e.pointer(_Q), offset, 4))

    def _state(self, row: Value) -> tuple[FloatRow, Value, Value]:
        """A row's sums, and where its maximum and its divisor are."""
        e = self.e
        base = e.at(self.state, row, 4 * (self.padded + 2))
        return FloatRow(base), e.at(base, e.i64(self.padded), 4), e.at(base, e.i64(self.padded + 1), 4)

    def _scale(self, index: int) -> Value:
        """What numbers of a cache are multiplied by."""
        if self.dtype != torch.float8_e4m3fn:
            return F32(1.0)
        return self.e.b.fmul(self.e.load(self.e.pointer(index), F32), F32(2.0**-E4M3_EXPONENT))
