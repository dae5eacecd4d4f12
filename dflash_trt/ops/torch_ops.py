"""The eager lowering: every operation of the vocabulary in torch, on a CPU or a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable, Span
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.quantization.fp8 import E4M3_IN_FLOAT16, FP8Tensor, decode_e4m3, e4m3_in_float16, encode_fp8
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4, fake_quantize_nvfp4


@dataclass(frozen=True)
class TorchOps:
    """`Ops` in torch. Caches are updated in place; everything else is a pure function.

    The last bits of a sum depend on how many rows a pass has. Where activations are quantized, one part in 10^7 may
    decide a rounding and become one in 16, and a token may follow from the size of a batch. So sums that lead to such a
    rounding are taken in float64 and rounded back, which hides their order: those of quantized layers and of attention.
    A model in float64 rounds to float32 before it rounds to e4m3 or e2m1.
    """

    quantizes_activations: bool = field(default=False, kw_only=True)
    """Does the model that decides about tokens?"""
    ranks: Ranks = field(default=ALONE, kw_only=True)
    """Who else runs this model."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.embedding(ids, table)
        rows = ids - self.ranks.rank * len(table)
        here = (rows >= 0) & (rows < len(table))
        found = F.embedding(rows.where(here, 0), table)
        return self.all_reduce(found.where(here[..., None], 0))

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight = linear.weight
        if isinstance(weight, FP8Tensor):
            return _fp8_linear(x, weight, linear)
        if isinstance(weight, NVFP4Tensor):
            return _nvfp4_linear(x, weight, linear)
        return F.linear(x, weight, linear.bias)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return torch.tanh(x / cap) * cap

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts), dim=-1)

    def rows(self, x: Tensor, start: int, end: int) -> Tensor:
        return x[:, start:end]

    def select_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.gather(1, indices[..., None].expand(-1, -1, x.shape[-1]))

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def rotary_rows(self, table: RotaryTable, span: Span) -> RotaryTable:
        """Both [B, 1, T, d]; the sines signed so that rotating is a roll, a product and a sum."""
        cos, sin = table.cos[span.positions], table.sin[span.positions]
        return RotaryTable(torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None])

    def rotary_embedding(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        return torch.addcmul(x * rotary.cos, x.roll(x.shape[-1] // 2, dims=-1), rotary.sin)

    def kv_cache_update(self, cache: LayerCache, keys: Tensor, values: Tensor, span: Span) -> LayerCache:
        rows = (span.slots[:, None], slice(None), span.positions)
        # Zero, or NaN where a head's key or value is not finite.
        mark = torch.add(keys * 0, values, alpha=0).sum(-1, keepdim=True)
        keys, values = keys + mark, values.masked_fill(mark.isnan(), 0)
        cache.keys[rows] = _stored(keys.transpose(1, 2), cache.key_scale)
        cache.values[rows] = _stored(values.transpose(1, 2), cache.value_scale)
        return cache

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> Tensor | None:
        """Boolean [B, 1, T, extent], or None where every row sees every key."""
        sequences, rows = span.positions.shape
        if sequences == 1 and window is None and (rows == 1 or not causal):
            return None
        query = span.positions[:, None, :, None]
        key = torch.arange(span.extent, device=query.device)
        visible: Tensor = key <= query if causal else key <= span.positions[:, None, -1:, None]
        if window is not None:
            visible = visible & ((query - key).abs() < window)
        return visible

    def attention(self, q: Tensor, cache: LayerCache, span: Span, mask: Tensor | None) -> Tensor:
        dtype = q.dtype
        keys = _visible(cache.keys, cache.key_scale, span, q.dtype)
        values = _visible(cache.values, cache.value_scale, span, q.dtype)
        wide = torch.float64 if self.quantizes_activations else dtype
        q, keys, values = (part.to(wide) for part in (q, keys, values))
        attended = _attention(q, keys, values, mask)
        if mask is not None and bool(attended.isnan().any()):
            attended = _attention_of_finite_keys(q, keys, values, mask)
        return attended.to(dtype)

    def expand_vocabulary(self, logits: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        full[..., offsets + torch.arange(len(offsets), device=offsets.device)] = logits
        return full


_DECODED = 1 << 18
"""Numbers of a quantized weight that are decoded at once on a CPU: a few times as fast as all of a large one."""


def _fp8_linear(x: Tensor, weight: FP8Tensor, linear: Linear) -> Tensor:
    """Codes are multiplied and their sums scaled, as FP8 matrix units do it. In float64 these sums are exact."""
    inputs, wide, scale = x, _wide(x, linear), weight.weight_scale
    if linear.input_scale is not None:
        inputs, scale = encode_fp8(x, linear.input_scale), scale.to(wide) * linear.input_scale
    # By way of float32: torch has no fast conversion from float16 to float64.
    parts = (e4m3_in_float16(codes).float().to(wide) for codes in torch.split(weight.weight, _rows(x, weight)))
    sums = _in_parts(inputs.to(wide), parts, None).mul_(scale / E4M3_IN_FLOAT16)
    return (sums if linear.bias is None else sums + linear.bias).to(x.dtype)


def _nvfp4_linear(x: Tensor, weight: NVFP4Tensor, linear: Linear) -> Tensor:
    wide = _wide(x, linear)
    inputs = x.to(wide)
    if linear.input_scale is not None:
        inputs = fake_quantize_nvfp4(inputs, linear.input_scale)
    packed = zip(*(torch.split(part, _rows(x, weight)) for part in (weight.weight, weight.weight_scale)), strict=True)
    parts = (dequantize_nvfp4(NVFP4Tensor(codes, scales, weight.weight_scale_2), wide) for codes, scales in packed)
    return _in_parts(inputs, parts, linear.bias).to(x.dtype)


def _wide(x: Tensor, linear: Linear) -> torch.dtype:
    """What a quantized layer sums in."""
    return torch.float64 if linear.input_scale is not None else torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor, weight: FP8Tensor | NVFP4Tensor) -> int:
    """How many rows of a weight are decoded at once: packed, it is held once; decoded, only while it is used."""
    return max(1, _DECODED // x.shape[-1]) if x.is_cpu else len(weight.weight)


def _in_parts(x: Tensor, parts: Iterable[Tensor], bias: Tensor | None) -> Tensor:
    """A linear layer whose weight comes in parts of its rows."""
    joined = torch.cat([F.linear(x, part) for part in parts], dim=-1)
    return joined if bias is None else joined + bias


def _attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def _attention_of_finite_keys(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention where keys are NaN: rows that see one are NaN, all others what they would be without it.

    Torch adds the mask to the scores, and NaN stays NaN. The pass keeps its shape, and so do the bits of a row.
    """
    lost = keys.isnan().any(-1).any(1)[:, None, None]
    attended = _attention(q, keys.masked_fill(lost.mT, 0), values, mask)
    return attended.masked_fill((mask & lost).any(-1, keepdim=True), float("nan"))


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values as their cache holds them."""
    return x if scale is None else encode_fp8(x, scale)


def _visible(cache: Tensor, scale: Tensor | None, span: Span, dtype: torch.dtype) -> Tensor:
    """The span's slots of a cache, as far as any of its rows may see, in `dtype`."""
    part = cache[span.slots if span.slot_range is None else span.slot_range, :, : span.extent]
    return part if scale is None else (decode_e4m3(part) * scale).to(dtype)
