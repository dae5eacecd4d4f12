"""Heads as caches hold them: their sizes and types, and in torch their norm and their rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.errors import UserError

TYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = range(16, 257, 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, rounded once to x's type."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., d] turned by angles of float32 cosines and sines [..., d / 2], in float32, rounded once to x's type."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def check_heads(
    op: str, x: Tensor, cos: Tensor, sin: Tensor, caches: tuple[Tensor, Tensor], scales: tuple[Tensor | None, ...]
) -> None:
    """See that there are kernels for these types and sizes.

    Args:
        op: what takes them.
        x: [..., d], keys or queries.
        cos, sin: [R, d / 2]
        caches: [..., S, d], of keys and of values.
        scales: of both caches.

    Raises:
        UserError: there are none, or positions that the caches have are not in the tables.
    """
    head_dim, positions = x.shape[-1], caches[0].shape[-2]
    if x.dtype not in TYPES or head_dim not in HEAD_DIMS:
        raise UserError(
            f"{op}: heads are of {head_dim} {x.dtype}; it takes bfloat16, float16 and float32, and heads of a multiple"
            f" of 16 up to {HEAD_DIMS[-1]}"
        )
    for cache, scale in zip(caches, scales, strict=True):
        is_fp8 = cache.dtype == torch.float8_e4m3fn
        if cache.dtype not in (x.dtype, torch.float8_e4m3fn) or is_fp8 != (scale is not None):
            raise UserError(
                f"{op}: a cache of {cache.dtype} {'without' if scale is None else 'with'} scales, heads of {x.dtype};"
                " it takes a cache of their type without, or of float8_e4m3fn with scales"
            )
    if caches[0].dtype != caches[1].dtype:
        raise UserError(f"{op}: keys are cached as {caches[0].dtype}, values as {caches[1].dtype}; it takes one type")
    if 2 * cos.shape[1] != head_dim or len(cos) < positions:
        raise UserError(
            f"{op}: cos and sin have shape {tuple(cos.shape)}, they must have ({positions} or more, {head_dim // 2})"
        )
