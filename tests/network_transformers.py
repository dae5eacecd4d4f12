"""What TensorRT's layers for transformers and quantization mean. See tests/network_arithmetic.py for the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorrt_rtx as trt
import torch
from torch import Tensor

from tests.network_formats import E2M1, NetworkFault, decode, encode_e2m1, encode_e4m3, encode_int8


def rotary_embedding(
    layer: trt.IRotaryEmbeddingLayer, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    """x [B, N, S, H]; cos and sin [B, S, d / 2], or [positions, d / 2] where `positions` [B, S] is given."""
    if not x.dtype == cos.dtype == sin.dtype:
        raise NetworkFault(f"{x.dtype} turned by {cos.dtype} and {sin.dtype}")
    turned = layer.rotary_embedding_dim or x.shape[-1]
    if positions is not None:
        if int(positions.min()) < 0 or int(positions.max()) >= len(cos):
            raise NetworkFault(f"positions up to {int(positions.max())} in a table of {len(cos)}")
        cos, sin = cos[positions.long()], sin[positions.long()]
    if cos.shape != (x.shape[0], x.shape[2], turned // 2) or sin.shape != cos.shape:
        raise NetworkFault(f"cos {list(cos.shape)} and sin {list(sin.shape)} for {list(x.shape)}, {turned} turned")
    c, s, part = cos.double()[:, None], sin.double()[:, None], x[..., :turned].double()
    pairs = part.unflatten(-1, (-1, 2)) if layer.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    result = torch.stack((a * c - b * s, a * s + b * c), dim=-1)
    result = result if layer.interleaved else result.transpose(-1, -2)
    return torch.cat((result.flatten(-2), x[..., turned:].double()), dim=-1)


def kv_cache_update(
    layer: trt.IKVCacheUpdateLayer, cache: Tensor, update: Tensor, write_indices: Tensor, *lengths: Tensor | None
) -> Tensor:
    """cache [B, N, S, H], update [B, N, T, H], write_indices [B]. What would be written past S is not."""
    if layer.cache_mode != trt.KVCacheMode.LINEAR or layer.update_form != trt.AttentionIOForm.PADDED_BHND:
        raise NetworkFault(f"no meaning is known for {layer.cache_mode.name} of {layer.update_form.name}")
    if cache.dtype != update.dtype or len(cache) != len(update) or int(write_indices.min()) < 0:
        raise NetworkFault(f"{update.dtype} of batch {len(update)} written at {write_indices.tolist()}")
    result = cache.clone()
    for row, new, start in zip(result, update, write_indices.tolist(), strict=True):
        end = min(start + new.shape[1], row.shape[1])
        row[:, start:end] = new[:, : max(end - start, 0)]
    return result


def attention(
    layer: trt.IAttentionOutputLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    key_value_lengths: Tensor | None,
) -> Tensor:
    """softmax(Q K^T, masked) V of [B, heads, tokens, H]. TensorRT does not scale: Q or K come scaled.

    A row that sees no key is NaN. Lower-right masks of sequences shorter than the padded keys are refused: TensorRT
    does not say where their lower right is.
    """
    described = layer.attention
    _refuse_unknown(described)
    if not query.dtype == key.dtype == value.dtype or (
        mask is not None and mask.dtype not in (torch.bool, query.dtype)
    ):
        raise NetworkFault("query, key, value and an additive mask are not of one type")
    groups = query.shape[1] // key.shape[1]
    if groups * key.shape[1] != query.shape[1]:
        raise NetworkFault(f"{query.shape[1]} query heads for {key.shape[1]} heads of keys")
    wide_key, wide_value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.double() @ wide_key.mT
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    visible = _visible(described.causal_kind, scores, key_value_lengths)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    if described.norm_op == trt.AttentionNormalizationOp.SOFTMAX:
        return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ wide_value
    return scores.masked_fill(~visible, 0) @ wide_value


def _refuse_unknown(described: trt.IAttention) -> None:
    forms = (described.query_form, described.key_value_form)
    if any(form != trt.AttentionIOForm.PADDED_BHND for form in forms):
        raise NetworkFault("packed attention is not known here")
    if described.normalization_quantize_scale is not None or described.num_ranks != 1:
        raise NetworkFault("attention with quantized probabilities or over several ranks is not known here")


def _visible(kind: trt.CausalMaskKind, scores: Tensor, lengths: Tensor | None) -> Tensor:
    batch, _, rows, keys = scores.shape
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    visible = torch.ones(batch, 1, rows, keys, dtype=torch.bool)
    if lengths is not None:
        if lengths.shape != (batch,) or int(lengths.max()) > keys:
            raise NetworkFault(f"lengths {lengths.tolist()} of {batch} sequences of {keys} keys")
        visible = key < lengths.reshape(-1, 1, 1, 1)
    if kind == trt.CausalMaskKind.NONE:
        return visible
    if kind == trt.CausalMaskKind.UPPER_LEFT:
        return visible & (key <= row)
    if lengths is not None and bool((lengths != keys).any()):
        raise NetworkFault(f"LOWER_RIGHT of lengths {lengths.tolist()} in {keys} keys is undefined: use a mask")
    return visible & (key <= row + keys - rows)


_ENCODERS: dict[trt.DataType, Callable[[Tensor], Tensor]] = {
    trt.fp8: encode_e4m3,
    trt.fp4: encode_e2m1,
    trt.int8: encode_int8,
}


def quantize(layer: trt.IQuantizeLayer, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """x / scale, clipped and rounded to nearest even."""
    return _encoder(layer.to_type)(x.double() / _spread(scale, x.shape, layer.axis, zero))


def dequantize(layer: trt.IDequantizeLayer, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    return decode(x, layer.get_input(0).dtype) * _spread(scale, x.shape, layer.axis, zero)


def _encoder(dtype: trt.DataType) -> Callable[[Tensor], Tensor]:
    if dtype not in _ENCODERS:
        raise NetworkFault(f"quantization to {dtype.name} is not known here")
    return _ENCODERS[dtype]


def _spread(scale: Tensor, shape: Sequence[int], axis: int, zero: Tensor | None) -> Tensor:
    """A scale of one tensor, of each index of an axis, or of blocks (as many dimensions as x), as x's shape."""
    if zero is not None and bool((zero != 0).any()):
        raise NetworkFault("a zero point other than 0")
    wide = scale.double()
    if wide.numel() == 1 and wide.ndim <= 1:
        return wide.reshape(())
    if wide.ndim == 1 and len(shape) > 1:
        if not 0 <= axis < len(shape) or len(wide) != shape[axis]:
            raise NetworkFault(f"{len(wide)} scales for axis {axis} of {list(shape)}")
        return wide.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    if wide.ndim != len(shape) or any(n % blocks for n, blocks in zip(shape, wide.shape, strict=True)):
        raise NetworkFault(f"scales {list(wide.shape)} are no blocks of {list(shape)}")
    for i, n in enumerate(shape):
        wide = wide.repeat_interleave(n // wide.shape[i], dim=i)
    return wide


def dynamic_quantize(
    layer: trt.IDynamicQuantizeLayer, x: Tensor, global_scale: Tensor | None = None
) -> Sequence[Tensor]:
    """NVFP4: each block's scale is its largest magnitude / 6, stored as e4m3(that / global_scale).

    A block is divided by the scale that was stored, times global_scale. One whose stored scale is 0 becomes zeros.
    """
    if (layer.to_type, layer.scale_type) != (trt.fp4, trt.fp8) or global_scale is None or global_scale.numel() != 1:
        raise NetworkFault(
            f"dynamic quantization to {layer.to_type.name}, scales {layer.scale_type.name}, is not known"
        )
    axis, size, second = layer.axis % x.ndim, layer.block_size, global_scale.double().reshape(())
    if x.shape[axis] % size:
        raise NetworkFault(f"axis {axis} of {list(x.shape)} is no multiple of {size}")
    blocks = x.double().unflatten(axis, (-1, size))
    stored = encode_e4m3(blocks.abs().amax(axis + 1) / E2M1[-1] / second)
    divisor = (decode(stored, trt.fp8) * second).unsqueeze(axis + 1)
    codes = encode_e2m1(torch.where(divisor == 0, 0.0, blocks / divisor))
    return codes.flatten(axis, axis + 1), stored


TRANSFORMER_LAYERS: dict[trt.LayerType, Callable[..., Tensor | Sequence[Tensor]]] = {
    trt.LayerType.ROTARY_EMBEDDING: rotary_embedding,
    trt.LayerType.KV_CACHE_UPDATE: kv_cache_update,
    trt.LayerType.ATTENTION_OUTPUT: attention,
    trt.LayerType.QUANTIZE: quantize,
    trt.LayerType.DEQUANTIZE: dequantize,
    trt.LayerType.DYNAMIC_QUANTIZE: dynamic_quantize,
}
