"""`block_attention`: attention of a block of queries over a cache, in torch and by its kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins.attention_combine import block_attention_combine_kernel
from dflash_trt.plugins.attention_partial import BlockAttention, block_attention_partial_kernel
from dflash_trt.plugins.attention_shares import filling_programs
from dflash_trt.plugins.gpus import MULTIPROCESSORS, SHARED_MEMORY
from dflash_trt.plugins.heads import check_heads, rms_norm, rotate
from dflash_trt.plugins.shapes import require_shapes

_INTERPRETED = 90
"""The compute capability of the GPU that the interpreter stands for."""


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
    programs: int | None = None,
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
        programs: thread blocks that the keys are split for, where sequences and heads do not make as many; None: those
            that fill the GPU.

    Returns:
        [B, T, H, d] of q's type; rows t >= q_len[b] are finite and mean nothing.

    Raises:
        UserError: a type or a shape that the kernels do not have.
    """
    require_shapes(
        "block_attention",
        q=(q, "B T H d"),
        q_norm=(q_norm, "d"),
        cos=(cos, "R h"),
        sin=(sin, "R h"),
        kv_len=(kv_len, "B"),
        q_len=(q_len, "B"),
        slots=(slots, "B"),
        k_scale=(k_scale, "1"),
        v_scale=(v_scale, "1"),
        k_cache=(k_cache, "P G S d"),
        v_cache=(v_cache, "P G S d"),
        sinks=(sinks, "H"),
    )
    check_heads("block_attention", q, cos, sin, (k_cache, v_cache), (k_scale, v_scale))
    if q.shape[2] % k_cache.shape[1]:
        raise UserError(
            f"block_attention: {q.shape[2]} query heads and {k_cache.shape[1]} KV heads; it takes a multiple of them"
        )
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
        eps=eps,
        most_rows=q.shape[1],
        compute_capability=_compute_capability(q),
        programs=programs or filling_programs(_multiprocessors(q)),
        ahead_of_time=False,
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
    batch, rows, heads, head_dim = q.shape
    cache_slots, kv_heads, positions, _ = k_cache.shape
    splits = attention.splits(batch, rows, kv_heads)
    lse = q.new_empty((attention.room(batch, rows, kv_heads), attention.block_m), dtype=torch.float32)
    partial = lse.new_empty((*lse.shape, head_dim))
    out = torch.empty_like(q)
    # What is unread needs an address all the same.
    q_norm = q if q_norm is None else q_norm
    k_scale, v_scale = (cos if tensor is None else tensor for tensor in (k_scale, v_scale))
    pointers = (q, q_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache)
    kernel = block_attention_partial_kernel(attention)
    kernel.launch(*pointers, batch, rows, kv_heads, cache_slots, positions, splits, partial, lse)
    kernel = block_attention_combine_kernel(q.dtype, head_dim, has_sinks=sinks is not None)
    sizes = (batch, rows, heads, kv_heads, attention.block_m, splits)
    kernel.launch(partial, lse, cos if sinks is None else sinks, q, *sizes, out)
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
    """The one to compile for."""
    if not tensor.is_cuda:
        return _INTERPRETED
    major, minor = torch.cuda.get_device_capability(tensor.device)
    nearest: int = max((known for known in SHARED_MEMORY if known <= 10 * major + minor), default=80)
    return nearest


def _multiprocessors(tensor: Tensor) -> int:
    there: int = MULTIPROCESSORS[_INTERPRETED]
    if tensor.is_cuda:
        there = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return there
