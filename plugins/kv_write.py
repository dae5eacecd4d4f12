"""`kv_write`: keys and values of all layers at once, normalized, rotated, quantized and put into the caches."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.plugins.heads import check_heads, rms_norm, rotate
from dflash_trt.plugins.kv_write_kernel import kv_write_kernel
from dflash_trt.plugins.shapes import require_shapes


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
    e4m3(clip(x / scale, -448, 448)) of both, ties to even. Where a head's key or value is not finite, its key becomes
    NaN and its value zero, so that attention which masks the position multiplies numbers only. Positions past the
    cache's end are not written.

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
    require_shapes(
        "kv_write",
        keys=(keys, "B T L G d"),
        values=(values, "B T L G d"),
        k_norm=(k_norm, "L d"),
        cos=(cos, "R h"),
        sin=(sin, "R h"),
        kv_len=(kv_len, "B"),
        q_len=(q_len, "B"),
        slots=(slots, "B"),
        k_scale=(k_scale, "L"),
        v_scale=(v_scale, "L"),
        k_cache=(k_cache, "L P G S d"),
        v_cache=(v_cache, "L P G S d"),
    )
    check_heads("kv_write", keys, cos, sin, (k_cache, v_cache), (k_scale, v_scale))
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
    stored = values[sequence, step]
    is_finite = (written.isfinite() & stored.isfinite()).all(-1, keepdim=True)
    k_cache[:, slot, :, position] = _stored(written.where(is_finite, float("nan")), k_scale)
    v_cache[:, slot, :, position] = _stored(stored.where(is_finite, 0.0), v_scale)


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """[rows, layers, KV heads, d] as the cache holds it."""
    if scale is None:
        return x
    return (x.float() / scale[:, None, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


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
