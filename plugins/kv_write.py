"""`kv_write`: keys and values of all layers at once, normalized, rotated, quantized and put into the caches.

Memory-bound: every element is read once and written once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins.e4m3 import e4m3_codes
from dflash_trt.plugins.kernel import Kernel, cdiv, pointer

TYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(16, 257, 16)


def kv_write(
    keys: Tensor,
    values: Tensor,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    eps: float = 0.0,
    interpret: bool = False,
) -> None:
    """Write row t < q_len[b] of sequence b at position kv_len[b] + t of slot slots[b], in place.

    Keys become rms_norm(k) * k_norm, the mean in float32, rounded to their type as torch's rms_norm rounds; then they
    are rotated in float32 (NeoX pairing (i, i + d / 2)) and rounded once. An FP8 cache takes
    e4m3(clip(x / scale, -448, 448)) of both, ties to even. Positions past the cache's end are not written.

    Args:
        keys, values: [B, T, layers, KV heads, d] bfloat16, float16 or float32; d a multiple of 16 up to 256.
        k_norm: [layers, d] of their type; None where keys are not normalized.
        cos, sin: [positions, d / 2] float32.
        kv_len, q_len, slots: [B] int32; slots differ.
        k_scale, v_scale: [layers] float32, for FP8 caches; otherwise None.
        k_cache, v_cache: [layers, slots, KV heads, positions, d] of the keys' type or float8_e4m3fn.
        eps: of the norm.
        interpret: on a CPU, the kernel in Triton's interpreter, not the reference.

    Raises:
        UserError: a type or a shape that the kernel does not have.
    """
    _check(keys, k_cache, v_cache, cos, k_scale)
    run = _launch if keys.is_cuda or interpret else kv_write_reference
    run(keys, values, k_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache, eps)


def kv_write_reference(
    keys: Tensor,
    values: Tensor,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> None:
    """`kv_write` in torch."""
    steps = torch.arange(keys.shape[1], device=keys.device)
    positions = kv_len[:, None] + steps
    sequence, step = ((steps < q_len[:, None]) & (positions < k_cache.shape[3])).nonzero(as_tuple=True)
    position, slot = positions[sequence, step], slots[sequence].long()
    written = keys[sequence, step]
    if k_norm is not None:
        written = rms_norm(written, k_norm[:, None], eps)
    written = rotate(written, cos[position][:, None, None], sin[position][:, None, None])
    k_cache[:, slot, :, position] = _stored(written, k_scale)
    v_cache[:, slot, :, position] = _stored(values[sequence, step], v_scale)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, rounded once to x's type."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] turned by angles of float32 cosines and sines [..., d / 2], in float32, rounded once to x's type."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """[rows, layers, KV heads, d] as the cache holds it."""
    if scale is None:
        return x
    return (x.float() / scale[:, None, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


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


def _launch(
    keys: Tensor,
    values: Tensor,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    eps: float,
) -> None:
    kernel = kv_write_kernel(keys.dtype, k_cache.dtype, keys.shape[-1], has_norm=k_norm is not None, eps=eps)
    # What is unread needs an address all the same.
    k_norm, k_scale, v_scale = (
        given if given is not None else unread for given, unread in ((k_norm, keys), (k_scale, cos), (v_scale, cos))
    )
    given = (keys, values, k_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache)
    kernel.launch(*given, *keys.shape[:4], k_cache.shape[1], k_cache.shape[3], k_cache, v_cache)


def _check(keys: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, k_scale: Tensor | None) -> None:
    _, _, layers, kv_heads, head_dim = keys.shape
    if keys.dtype not in TYPES or head_dim not in HEAD_DIMS:
        raise UserError(
            f"kv_write: keys are {keys.dtype} with heads of {head_dim}; it takes bfloat16, float16 and float32,"
            f" and heads of a multiple of 16 up to {HEAD_DIMS[-1]}"
        )
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if k_cache.dtype not in (keys.dtype, torch.float8_e4m3fn) or is_fp8 != (k_scale is not None):
        scales = "with" if k_scale is not None else "without"
        raise UserError(
            f"kv_write: a cache of {k_cache.dtype} {scales} scales, keys of {keys.dtype};"
            " it takes a cache of the keys' type without, or of float8_e4m3fn with scales"
        )
    _, slots, _, positions, _ = k_cache.shape
    wanted = (layers, slots, kv_heads, positions, head_dim)
    if k_cache.shape != wanted or v_cache.shape != wanted or cos.shape[0] < positions:
        raise UserError(
            f"kv_write: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} for keys {tuple(keys.shape)} and"
            f" {len(cos)} rows of cosines; caches must be {wanted}, and there must be a cosine for each position"
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
    live = inside & (row < tl.load(q_len + sequence, mask=inside, other=0)) & (position < positions)
    slot = tl.load(slots + sequence, mask=live, other=0)

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
