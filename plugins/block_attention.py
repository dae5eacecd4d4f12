"""`block_attention`: attention of a block of queries over a cache, in torch and by its kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins.attention_kernels import PROGRAMS, BlockAttention, combine_kernel, partial_kernel
from dflash_trt.plugins.kernel import SHARED_MEMORY
from dflash_trt.plugins.kv_write import HEAD_DIMS, TYPES, rms_norm, rotate


def block_attention(
    q: Tensor,
    q_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None = None,
    *,
    causal: bool,
    window: int = 0,
    eps: float = 0.0,
    interpret: bool = False,
    programs: int = PROGRAMS,
) -> Tensor:
    """softmax(q k / sqrt(d)) v, where row t of sequence b stands at position p = kv_len[b] + t of slot slots[b].

    It sees key k iff k < kv_len[b] + q_len[b], k <= p where causal, and |p - k| < window where there is one. Queries
    are normalized and rotated first, as `kv_write` does it with keys.

    Args:
        q: [B, T, H, d] bfloat16, float16 or float32, H a multiple of KV heads; d a multiple of 16 up to 256.
        q_norm: [d] of its type; None where queries are not normalized.
        cos, sin: [positions, d / 2] float32.
        kv_len, q_len, slots: [B] int32.
        k_scale, v_scale: [1] float32, what codes of an FP8 cache are times; otherwise None.
        k_cache, v_cache: [slots, KV heads, positions, d] of q's type or float8_e4m3fn, the block's own rows written.
        sinks: [H] float32, logits that join a row's softmax with no value; None for none.
        window: 0 for none.
        eps: of the norm.
        interpret: on a CPU, the kernels in Triton's interpreter, not the reference.
        programs: thread blocks that the keys are split for, where sequences and heads do not make as many.

    Returns:
        [B, T, H, d] of q's type; rows t >= q_len[b] are finite and mean nothing.

    Raises:
        UserError: a type or a shape that the kernels do not have.
    """
    _check(q, k_cache, v_cache, cos, k_scale)
    given = (q, q_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache)
    if not q.is_cuda and not interpret:
        return block_attention_reference(*given, sinks, causal=causal, window=window, eps=eps)
    attention = BlockAttention(
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        head_dim=q.shape[3],
        ratio=q.shape[2] // k_cache.shape[1],
        causal=causal,
        window=window,
        has_norm=q_norm is not None,
        has_sinks=sinks is not None,
        eps=eps,
        most_rows=q.shape[1],
        compute_capability=_compute_capability(q),
        programs=programs,
    )
    return launch_block_attention(attention, *given, sinks)


def launch_block_attention(
    attention: BlockAttention,
    q: Tensor,
    q_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """`block_attention` by the kernels, on CUDA or in the interpreter."""
    batch, rows, heads, _ = q.shape
    _, kv_heads, positions, _ = k_cache.shape
    splits = attention.splits(batch, rows, kv_heads)
    partial = q.new_empty((splits, *q.shape), dtype=torch.float32)
    lse = q.new_empty((splits, *q.shape[:3]), dtype=torch.float32)
    out = torch.empty_like(q)
    # What is unread needs an address all the same.
    q_norm = q if q_norm is None else q_norm
    k_scale, v_scale, sinks = (cos if tensor is None else tensor for tensor in (k_scale, v_scale, sinks))
    pointers = (q, q_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache)
    partial_kernel(attention).launch(*pointers, batch, rows, kv_heads, positions, splits, partial, lse)
    combine_kernel(attention).launch(partial, lse, sinks, q, batch, rows, heads, splits, out)
    return out


def block_attention_reference(
    q: Tensor,
    q_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    sinks: Tensor | None,
    *,
    causal: bool,
    window: int,
    eps: float,
) -> Tensor:
    """`block_attention` in torch, a sequence at a time; rows that mean nothing are zero."""
    out = torch.zeros_like(q)
    for each, (context, count, slot) in enumerate(zip(kv_len.tolist(), q_len.tolist(), slots.tolist(), strict=True)):
        positions = torch.arange(context, min(context + count, k_cache.shape[2]), device=q.device)
        keys = torch.arange(min(context + count, k_cache.shape[2]), device=q.device)
        queries = q[each, : len(positions)]
        if q_norm is not None:
            queries = rms_norm(queries, q_norm, eps)
        queries = rotate(queries, cos[positions][:, None], sin[positions][:, None])
        ratio = q.shape[2] // k_cache.shape[1]
        k, v = (
            cached[slot, :, : len(keys)].float().mul(1.0 if scale is None else scale).repeat_interleave(ratio, 0)
            for cached, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        distance = positions[:, None] - keys
        hidden = (distance < 0) & causal
        if window:
            hidden = hidden | (distance.abs() >= window)
        scores = queries.float().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(positions), 1)), dim=-1)
        out[each, : len(positions)] = (scores.softmax(-1)[..., : len(keys)] @ v).transpose(0, 1).to(q.dtype)
    return out


def _compute_capability(tensor: Tensor) -> int:
    """The one to compile for; in the interpreter, that of an H100."""
    if not tensor.is_cuda:
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return max((known for known in SHARED_MEMORY if known <= 10 * major + minor), default=80)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor, k_scale: Tensor | None) -> None:
    heads, head_dim = q.shape[2:]
    if q.dtype not in TYPES or head_dim not in HEAD_DIMS:
        raise UserError(
            f"block_attention: queries are {q.dtype} with heads of {head_dim}; it takes bfloat16, float16 and float32,"
            f" and heads of a multiple of 16 up to {HEAD_DIMS[-1]}"
        )
    is_fp8 = k_cache.dtype == torch.float8_e4m3fn
    if k_cache.dtype not in (q.dtype, torch.float8_e4m3fn) or is_fp8 != (k_scale is not None):
        scales = "with" if k_scale is not None else "without"
        raise UserError(
            f"block_attention: a cache of {k_cache.dtype} {scales} scales, queries of {q.dtype};"
            " it takes a cache of the queries' type without, or of float8_e4m3fn with scales"
        )
    slots, kv_heads, positions, _ = k_cache.shape
    wanted = (slots, kv_heads, positions, head_dim)
    if k_cache.shape != wanted or v_cache.shape != wanted or heads % kv_heads or len(cos) < positions:
        raise UserError(
            f"block_attention: caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)} for queries {tuple(q.shape)}"
            f" and {len(cos)} rows of cosines; caches must be {wanted}, heads a multiple of KV heads,"
            " and there must be a cosine for each position"
        )
