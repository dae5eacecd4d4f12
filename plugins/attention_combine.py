"""`block_attention_combine`: the shares that `block_attention_partial` made of the keys, joined."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernel import Kernel, pointer


@cache
def block_attention_combine_kernel(dtype: torch.dtype, head_dim: int, *, has_sinks: bool) -> Kernel:
    """The kernel for an output [B, T, H, d] of `dtype`, with or without the sinks."""
    return Kernel(
        function=dflash_block_attention_combine,
        parameters={
            **dict.fromkeys(("partial", "lse", "sinks"), "*fp32"),
            "q": pointer(dtype),
            **dict.fromkeys(("batch", "rows", "heads", "kv_heads", "block_m", "splits"), "i32"),
            "out": pointer(dtype),
        },
        constants={
            "HAS_SINKS": has_sinks,
            "HEAD_DIM": head_dim,
            "WIDTH": triton.next_power_of_2(head_dim),
            "BLOCK": 16,
        },
        grid=lambda s: (s["batch"] * s["rows"] * s["heads"], 1, 1),
        num_warps=2,
    )


@triton.jit
def dflash_block_attention_combine(
    partial,
    lse,
    sinks,
    q,
    batch,
    rows,
    heads,
    kv_heads,
    block_m,
    splits,
    out,
    HAS_SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one row a program. `q` is not read: TensorRT passes it, whose shape and type the output has."""
    head = tl.program_id(0).to(tl.int64)
    # Where `block_attention_partial` left the head's row.
    ratio = heads // kv_heads
    tiles = tl.cdiv(rows * ratio, block_m)
    kv_head = head % heads // ratio
    row = head // heads % rows * ratio + head % ratio
    group = head // (heads * rows) * kv_heads + kv_head
    first = (group * tiles + row // block_m) * block_m + row % block_m
    stride = batch.to(tl.int64) * kv_heads * tiles * block_m
    column = tl.arange(0, WIDTH)
    maximum = float("-inf")
    total = 0.0
    if HAS_SINKS:
        maximum = tl.load(sinks + head % heads)
        total = 1.0
    sums = tl.zeros([WIDTH], tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + tl.arange(0, BLOCK)
        place = split * stride + first
        weight = tl.load(lse + place, mask=split < splits, other=float("-inf"))
        saw = weight > float("-inf")
        higher = tl.maximum(maximum, tl.max(weight, axis=0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(weight - finite)
        kept = tl.exp(maximum - finite)
        mask = saw[:, None] & (column < HEAD_DIM)[None, :]
        share = tl.load(partial + place[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        sums = sums * kept + tl.sum(share * weight[:, None], axis=0)
        total = total * kept + tl.sum(weight, axis=0)
        maximum = higher
    result = sums / tl.where(total == 0, 1.0, total)
    tl.store(out + head * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)
