"""The eager lowering: every operation of the vocabulary in torch, on a CPU or a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable, Span


class TorchOps:
    """`Ops` in torch. Caches are updated in place; everything else is a pure function."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if x.device.type == "cpu" and linear.weight.shape[0] > _TALL and x.numel() // x.shape[-1] in _FEW_ROWS:
            return _tall_linear(x, linear)
        return F.linear(x, linear.weight, linear.bias)

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
        cache.keys[rows] = keys.transpose(1, 2)
        cache.values[rows] = values.transpose(1, 2)
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
        keys, values = (_visible_part(part, span) for part in (cache.keys, cache.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    def expand_vocabulary(self, logits: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        full[..., offsets + torch.arange(len(offsets), device=offsets.device)] = logits
        return full


_TALL = 8192
_FEW_ROWS = range(4, 9)
_PART = 512


def _tall_linear(x: Tensor, linear: Linear) -> Tensor:
    """A vocabulary's rows in parts that stay in cache: 1.2 to 1.7 times as fast for a block of 4 to 8 rows."""
    parts = [F.linear(x, part) for part in linear.weight.split(_PART)]
    joined = torch.cat(parts, dim=-1)
    return joined if linear.bias is None else joined + linear.bias


def _visible_part(cache: Tensor, span: Span) -> Tensor:
    slots = span.slots if span.slot_range is None else span.slot_range
    return cache[slots, :, : span.extent]
