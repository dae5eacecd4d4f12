"""`block_attention_partial`: attention of the rows of all query heads of a KV head over a share of the keys.

A cache is read once for up to `MOST_ROWS` such rows, and only where one of them can see it. No score leaves a
multiprocessor. `block_attention_combine` joins the shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.attention_shares import Shares
from dflash_trt.plugins.e4m3 import e4m3_values
from dflash_trt.plugins.gpus import SHARED_MEMORY
from dflash_trt.plugins.kernel import Kernel, pointer


@dataclass(frozen=True)
class BlockAttention(Shares):  # type: ignore[misc]  # mypy does not see what is installed as dflash_trt.plugins
    """What the kernel is compiled for, and what its keys are split for."""

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_dim: int
    causal: bool
    window: int
    has_norm: bool
    eps: float
    compute_capability: int

    @property
    def block_n(self) -> int:
        """Keys that it takes at a time."""
        if self._leaves_no_room_for_barriers:
            return 16
        return min(64, max(16, (16384 if self._is_roomy else 8192) // self._width))

    @property
    def num_stages(self) -> int:
        """Blocks of keys and values that are under way at once, and one that is used."""
        return 3 if self._is_roomy or self._leaves_no_room_for_barriers else 2

    @property
    def _width(self) -> int:
        """Bytes of a head."""
        return int(triton.next_power_of_2(self.head_dim)) * self.dtype.itemsize

    @property
    def _is_roomy(self) -> bool:
        return SHARED_MEMORY[self.compute_capability] > 99 and not self.ahead_of_time

    @property
    def _leaves_no_room_for_barriers(self) -> bool:
        """Queries, and two blocks of 32 keys and values in 16 bits, are all that TensorRT's kernels have; the matrix
        units of compute capability 10 have barriers in memory beside them."""
        is_whole = self.cache_dtype == self.dtype and self._width == 256
        return self.ahead_of_time and self.compute_capability in (100, 103) and is_whole


@cache
def block_attention_partial_kernel(attention: BlockAttention) -> Kernel:
    """`block_attention_partial`: partial [N, M, d] and lse [N, M], both float32, of M = `block_m` rows of N programs.

    Program ((split * B + sequence) * G + KV head) * tiles + tile leaves, of its share of the keys, the normalized sum
    of values, and the natural logarithm of the sum that it was divided by: -inf where a row saw no key, and then
    `partial` may be anything. Its row m is t * ratio + query head of the KV head's, counted from tile * M. N is
    `room`: what lies past the programs that there are is not written.
    """
    # Before compute capability 8.9 there are no conversions from e4m3.
    coded = attention.cache_dtype == torch.float8_e4m3fn and attention.compute_capability < 89
    held = "*u8" if coded else pointer(attention.cache_dtype)
    return Kernel(
        function=dflash_block_attention_partial,
        parameters={
            **dict.fromkeys(("q", "q_norm"), pointer(attention.dtype)),
            **dict.fromkeys(("cos", "sin"), "*fp32"),
            **dict.fromkeys(("kv_len", "q_len", "slots"), "*i32"),
            **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
            **dict.fromkeys(("k_cache", "v_cache"), held),
            **dict.fromkeys(("batch", "rows", "kv_heads", "cache_slots", "positions", "splits"), "i32"),
            **dict.fromkeys(("partial", "lse"), "*fp32"),
        },
        constants={
            "EPS": attention.eps,
            "HAS_NORM": attention.has_norm,
            "CAUSAL": attention.causal,
            "WINDOW": attention.window,
            "SCALED": attention.cache_dtype == torch.float8_e4m3fn,
            "RATIO": attention.ratio,
            "HEAD_DIM": attention.head_dim,
            "WIDTH": triton.next_power_of_2(attention.head_dim),
            "BLOCK_M": attention.block_m,
            "BLOCK_N": attention.block_n,
        },
        grid=lambda s: (attention.tiles(s["rows"]), s["kv_heads"] * s["splits"], s["batch"]),
        num_warps=8 if attention.block_m > 64 else 4,
        num_stages=attention.num_stages,
    )


@triton.jit
def _rotated_queries(
    q,
    q_norm,
    cos,
    sin,
    offset,
    position,
    live,
    EPS,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows [BLOCK_M, WIDTH] at `offset`, normalized and rotated, zero where they are not `live`."""
    column = tl.arange(0, WIDTH)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    partner = tl.where(column < half, column + half, column - half)
    mask = live[:, None] & (column < HEAD_DIM)
    x = tl.load(q + offset[:, None] + column, mask=mask, other=0.0)
    y = tl.load(q + offset[:, None] + partner, mask=mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + EPS)[:, None]
        own = tl.load(q_norm + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        other = tl.load(q_norm + partner, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
        x = (x * factor * own).to(dtype).to(tl.float32)
        y = (y * factor * other).to(dtype).to(tl.float32)
    angle = position[:, None] * half + tl.minimum(column, partner)
    cosine = tl.load(cos + angle, mask=mask, other=0.0)
    sine = tl.load(sin + angle, mask=mask, other=0.0)
    return (x * cosine + y * tl.where(column < half, -sine, sine)).to(dtype)


@triton.jit
def dflash_block_attention_partial(
    q,
    q_norm,
    cos,
    sin,
    kv_len,
    q_len,
    slots,
    k_scale,
    v_scale,
    k_cache,
    v_cache,
    batch,
    rows,
    kv_heads,
    cache_slots,
    positions,
    splits,
    partial,
    lse,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`BLOCK_M` rows of a KV head against a share of the keys, `BLOCK_N` at a time."""
    # The last rows of a causal prefill see most: those programs start first.
    tiles = tl.num_programs(0)
    tile = tiles - 1 - tl.program_id(0)
    first_row = tile * BLOCK_M
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(1) // kv_heads
    sequence = tl.program_id(2)
    # While TensorRT times kernels, lengths and slots are whatever there is in memory.
    context = tl.minimum(tl.maximum(tl.load(kv_len + sequence), 0), positions)
    count = tl.minimum(tl.maximum(tl.load(q_len + sequence), 0), rows)
    slot = tl.minimum(tl.maximum(tl.load(slots + sequence), 0), cache_slots - 1)

    # Keys that any row of this program can see.
    first = context + first_row // RATIO
    last = context + tl.minimum((first_row + BLOCK_M - 1) // RATIO, count - 1)
    begin = 0
    end = tl.minimum(context + count, positions)
    # Keys that all of them see.
    sure_begin = 0
    sure_end = end
    if CAUSAL:
        end = tl.minimum(end, last + 1)
        sure_end = tl.minimum(end, first + 1)
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0)
        sure_begin = last - WINDOW + 1
        if not CAUSAL:
            end = tl.minimum(end, last + WINDOW)
            sure_end = tl.minimum(end, first + WINDOW)
    seen = tl.where(first <= last, tl.maximum(end - begin, 0), 0)
    share = tl.cdiv(tl.cdiv(seen, splits), BLOCK_N) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, end)
    sure_end = tl.minimum(sure_end, end)

    row = first_row + tl.arange(0, BLOCK_M)
    position = context + row // RATIO
    live = (row < rows * RATIO) & (begin < end)
    head = (sequence.to(tl.int64) * rows + row // RATIO) * (kv_heads * RATIO) + kv_head * RATIO + row % RATIO
    counts = live & (position < tl.minimum(context + count, positions))
    query = _rotated_queries(q, q_norm, cos, sin, head * HEAD_DIM, position, counts, EPS, HAS_NORM, HEAD_DIM, WIDTH)
    scale = 1.4426950408889634 * HEAD_DIM**-0.5  # for exp2
    if SCALED:
        scale *= tl.load(k_scale)

    column = tl.arange(0, WIDTH)
    cached = (slot.to(tl.int64) * kv_heads + kv_head) * positions * HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        offset = key[:, None] * HEAD_DIM + column[None, :]
        # What lies past the end was never written, and zero times NaN is NaN.
        mask = (key < end)[:, None] & (column < HEAD_DIM)[None, :]
        keys = e4m3_values(tl.load(k_cache + cached + offset, mask=mask, other=0.0), query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if (start < sure_begin) | (start + BLOCK_N > sure_end):
            visible = (key < end)[None, :]
            if CAUSAL:
                visible &= key[None, :] <= position[:, None]
            if WINDOW > 0:
                visible &= tl.abs(position[:, None] - key[None, :]) < WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(maximum - finite)
        total = total * kept + tl.sum(weights, axis=1)
        values = e4m3_values(tl.load(v_cache + cached + offset, mask=mask, other=0.0), query.dtype)
        sums = tl.dot(weights.to(query.dtype), values, sums * kept[:, None], input_precision="ieee")
        maximum = higher

    divisor = tl.where(total == 0, 1.0, total)
    sums = sums / divisor[:, None]
    if SCALED:
        sums *= tl.load(v_scale)
    logarithm = tl.where(total == 0, float("-inf"), (maximum + tl.log2(divisor)) * 0.6931471805599453)
    program = ((split * batch + sequence) * kv_heads + kv_head) * tiles + tile
    target = program.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(lse + target, logarithm, mask=row < rows * RATIO)
    written = live[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(partial + target[:, None] * HEAD_DIM + column[None, :], sums, mask=written)
