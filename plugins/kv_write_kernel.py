"""The kernel of `kv_write`: all layers at once, each element read once and written once.

It is bound by memory alone.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.e4m3 import e4m3_codes
from dflash_trt.plugins.kernel import Kernel, cdiv, pointer


@cache
def kv_write_kernel(
    dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, *, has_norm: bool, eps: float
) -> Kernel:
    """The kernel for keys of `dtype` and caches of `cache_dtype`."""
    half = triton.next_power_of_2(head_dim // 2)
    block = max(1, 1024 // half)  # 8 elements a thread of either half: 16 bytes of a 16-bit type
    held = "*u8" if cache_dtype == torch.float8_e4m3fn else pointer(cache_dtype)
    return Kernel(
        function=dflash_kv_write,
        parameters={
            **dict.fromkeys(("keys", "values", "k_norm"), pointer(dtype)),
            **dict.fromkeys(("cos", "sin"), "*fp32"),
            **dict.fromkeys(("kv_len", "q_len", "slots"), "*i32"),
            **dict.fromkeys(("k_scale", "v_scale"), "*fp32"),
            **dict.fromkeys(("k_cache_in", "v_cache_in"), held),
            **dict.fromkeys(("batch", "rows", "layers", "kv_heads", "cache_slots", "positions"), "i32"),
            **dict.fromkeys(("k_cache", "v_cache"), held),
        },
        constants={"EPS": eps, "HAS_NORM": has_norm, "HEAD_DIM": head_dim, "HALF": half, "BLOCK": block},
        grid=lambda s: (cdiv(s["batch"] * s["rows"] * s["layers"] * s["kv_heads"], block), 1, 1),
    )


@triton.jit
def dflash_kv_write(
    keys,
    values,
    k_norm,
    cos,
    sin,
    kv_len,
    q_len,
    slots,
    k_scale,
    v_scale,
    k_cache_in,
    v_cache_in,
    batch,
    rows,
    layers,
    kv_heads,
    cache_slots,
    positions,
    k_cache,
    v_cache,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Heads `BLOCK` at a time, in the order of keys [batch, rows, layers, kv_heads, HEAD_DIM]."""
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = head < batch * rows * layers * kv_heads
    kv_head = head % kv_heads
    layer = (head // kv_heads) % layers
    row = (head // (kv_heads * layers)) % rows
    sequence = head // (kv_heads * layers * rows)
    position = tl.load(kv_len + sequence, mask=inside, other=0) + row
    live = inside & (row < tl.load(q_len + sequence, mask=inside, other=0)) & (position >= 0) & (position < positions)
    # While TensorRT times kernels, lengths and slots are whatever there is in memory.
    slot = tl.load(slots + sequence, mask=live, other=0)
    live = live & (slot >= 0) & (slot < cache_slots)

    column = tl.arange(0, HALF)[None, :]
    mask = live[:, None] & (column < HEAD_DIM // 2)
    source = head.to(tl.int64)[:, None] * HEAD_DIM + column
    low = tl.load(keys + source, mask=mask, other=0.0)
    high = tl.load(keys + source + HEAD_DIM // 2, mask=mask, other=0.0)
    value_low = tl.load(values + source, mask=mask, other=0.0)
    value_high = tl.load(values + source + HEAD_DIM // 2, mask=mask, other=0.0)

    angle = position.to(tl.int64)[:, None] * (HEAD_DIM // 2) + column
    cosine = tl.load(cos + angle, mask=mask, other=0.0)
    sine = tl.load(sin + angle, mask=mask, other=0.0)
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        weight = layer[:, None] * HEAD_DIM + column
        low_weight = tl.load(k_norm + weight, mask=mask, other=0.0).to(tl.float32)
        high_weight = tl.load(k_norm + weight + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(low * low + high * high, axis=1) / HEAD_DIM
        factor = tl.rsqrt(mean + EPS)[:, None]
        low = (low * factor * low_weight).to(dtype).to(tl.float32)
        high = (high * factor * high_weight).to(dtype).to(tl.float32)
    key_low = (low * cosine - high * sine).to(dtype)
    key_high = (high * cosine + low * sine).to(dtype)

    # Zero, or NaN where one of them is not finite.
    key_low, key_high = key_low.to(tl.float32), key_high.to(tl.float32)
    value_low, value_high = value_low.to(tl.float32), value_high.to(tl.float32)
    mark = tl.sum(key_low * 0.0 + key_high * 0.0 + value_low * 0.0 + value_high * 0.0, axis=1)
    finite = (mark == 0.0)[:, None]
    key_low = tl.where(finite, key_low, float("nan")).to(dtype)
    key_high = tl.where(finite, key_high, float("nan")).to(dtype)
    value_low = tl.where(finite, value_low, 0.0).to(dtype)
    value_high = tl.where(finite, value_high, 0.0).to(dtype)

    cache_row = ((layer.to(tl.int64) * cache_slots + slot) * kv_heads + kv_head) * positions + position
    target = cache_row[:, None] * HEAD_DIM + column
    if k_cache.dtype.element_ty == tl.uint8:
        key_scale = tl.load(k_scale + layer, mask=live, other=1.0)[:, None]
        value_scale = tl.load(v_scale + layer, mask=live, other=1.0)[:, None]
        key_low = e4m3_codes(tl.div_rn(key_low.to(tl.float32), key_scale))
        key_high = e4m3_codes(tl.div_rn(key_high.to(tl.float32), key_scale))
        value_low = e4m3_codes(tl.div_rn(value_low.to(tl.float32), value_scale))
        value_high = e4m3_codes(tl.div_rn(value_high.to(tl.float32), value_scale))
    tl.store(k_cache + target, key_low, mask=mask)
    tl.store(k_cache + target + HEAD_DIM // 2, key_high, mask=mask)
    tl.store(v_cache + target, value_low, mask=mask)
    tl.store(v_cache + target + HEAD_DIM // 2, value_high, mask=mask)
