"""The eager lowering: every operation of the vocabulary in torch, on a CPU or a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable, Span
from dflash_trt.quantization.fp8 import E4M3_MAX, FP8Tensor, decode_e4m3, dequantize_fp8, fake_quantize_fp8
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4, fake_quantize_nvfp4


class TorchOps:
    """`Ops` in torch. Caches are updated in place; everything else is a pure function."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(ids, table)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight = linear.weight
        if isinstance(weight, (FP8Tensor, NVFP4Tensor)):
            return _quantized_linear(x, weight, linear)
        if x.device.type == "cpu" and weight.shape[0] > _TALL and x.numel() // x.shape[-1] in _FEW_ROWS:
            return _in_parts(x, torch.split(weight, _PART), _PART, linear.bias)
        return F.linear(x, weight, linear.bias)

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
        keys = _visible(cache.keys, cache.key_scale, span, q.dtype)
        values = _visible(cache.values, cache.value_scale, span, q.dtype)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

    def expand_vocabulary(self, logits: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        full = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
        full[..., offsets + torch.arange(len(offsets), device=offsets.device)] = logits
        return full


_TALL = 8192
_FEW_ROWS = range(4, 9)
_PART = 512
"""Of an unquantized vocabulary, rows that stay in cache: 1.2 to 1.7 times as fast for a block of 4 to 8 rows."""
_DECODED = 1 << 19
"""Numbers of a quantized weight that are decoded at once on a CPU: two to five times as fast as all of a large one."""


def _quantized_linear(x: Tensor, weight: FP8Tensor | NVFP4Tensor, linear: Linear) -> Tensor:
    """The packed weight is the only one that is held: it is decoded to x's type, part by part, every time."""
    if linear.input_scale is not None:
        fake_quantize = fake_quantize_fp8 if isinstance(weight, FP8Tensor) else fake_quantize_nvfp4
        x = fake_quantize(x, linear.input_scale)
    rows = max(1, _DECODED // x.shape[-1]) if x.device.type == "cpu" else len(weight.weight)
    return _in_parts(x, _decoded(weight, rows, x.dtype), rows, linear.bias)


def _decoded(weight: FP8Tensor | NVFP4Tensor, rows: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The weight in `dtype`, `rows` rows at a time."""
    if isinstance(weight, FP8Tensor):
        for codes in torch.split(weight.weight, rows):
            yield dequantize_fp8(weight._replace(weight=codes), dtype)
    else:
        for codes, scales in zip(torch.split(weight.weight, rows), torch.split(weight.weight_scale, rows), strict=True):
            yield dequantize_nvfp4(weight._replace(weight=codes, weight_scale=scales), dtype)


def _in_parts(x: Tensor, parts: Iterable[Tensor], rows: int, bias: Tensor | None) -> Tensor:
    """The layer whose weight comes `rows` rows at a time."""
    biases = repeat(None) if bias is None else torch.split(bias, rows)
    return torch.cat([F.linear(x, *part) for part in zip(parts, biases, strict=False)], dim=-1)


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Keys or values as their cache holds them."""
    if scale is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Clipped first: older torch casts what is too large for e4m3 to NaN.
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _visible(cache: Tensor, scale: Tensor | None, span: Span, dtype: torch.dtype) -> Tensor:
    """The span's slots of a cache, as far as any of its rows may see, in `dtype`."""
    part = cache[span.slots if span.slot_range is None else span.slot_range, :, : span.extent]
    return part if scale is None else (decode_e4m3(part) * scale).to(dtype)
