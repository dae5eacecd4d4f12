"""The pre-norm decoder layer that Llama, Qwen3 and the DFlash drafter share.

h += o(attention(norm(h))); h += down(swiglu(norm(h))). Queries and keys may be normed per head before they are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.models.weights import WeightLoader
from dflash_trt.ops.base import LayerCache, Linear, Mask, Ops, RotaryTable, Span, Tensor


class LayerConfig(Protocol):
    """What a layer needs to know of its model's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def quantization(self) -> QuantizationConfig | None: ...


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights; `q_norm` and `k_norm` [d] where the family norms its heads.

    `k_scale` and `v_scale`, float32 scalars, are those of its cache where that is quantized.
    """

    input_norm: Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    post_attention_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


def load_layer(
    loader: WeightLoader, prefix: str, config: LayerConfig, *, qk_norm: bool, mlp_bias: bool = False
) -> DecoderLayer:
    """The layer whose tensors are named `prefix`.self_attn.q_proj.weight and so on, as Hugging Face names them."""
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    attention, mlp, bias = f"{prefix}.self_attn", f"{prefix}.mlp", config.attention_bias
    fp8_cache = config.quantization is not None and config.quantization.kv_cache_quant_algo == "FP8"
    return DecoderLayer(
        input_norm=loader.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        q=loader.linear(f"{attention}.q_proj", q_size, hidden, bias=bias),
        k=loader.linear(f"{attention}.k_proj", kv_size, hidden, bias=bias),
        v=loader.linear(f"{attention}.v_proj", kv_size, hidden, bias=bias),
        o=loader.linear(f"{attention}.o_proj", hidden, q_size, bias=bias),
        q_norm=loader.tensor(f"{attention}.q_norm.weight", (head_dim,)) if qk_norm else None,
        k_norm=loader.tensor(f"{attention}.k_norm.weight", (head_dim,)) if qk_norm else None,
        k_scale=loader.scale(f"{attention}.k_proj.k_scale") if fp8_cache else None,
        v_scale=loader.scale(f"{attention}.v_proj.v_scale") if fp8_cache else None,
        post_attention_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate=loader.linear(f"{mlp}.gate_proj", ffn, hidden, bias=mlp_bias),
        up=loader.linear(f"{mlp}.up_proj", ffn, hidden, bias=mlp_bias),
        down=loader.linear(f"{mlp}.down_proj", hidden, ffn, bias=mlp_bias),
    )


def run_layer(
    ops: Ops,
    config: LayerConfig,
    layer: DecoderLayer,
    hidden: Tensor,
    cache: LayerCache,
    span: Span,
    rotary: RotaryTable,
    mask: Mask,
) -> Tensor:
    """The layer on hidden states [B, T, D], whose keys and values it writes into `cache` at the span's rows."""
    normed = ops.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
    cache = write_keys_values(ops, config, layer, normed, cache, span, rotary)
    q = _heads(ops, config, ops.linear(normed, layer.q), layer.q_norm)
    attended = ops.attention(ops.rotary_embedding(q, rotary), cache, span, mask)
    hidden = ops.add(hidden, ops.linear(ops.merge_heads(attended), layer.o))

    normed = ops.rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
    activated = ops.swiglu(ops.linear(normed, layer.gate), ops.linear(normed, layer.up))
    return ops.add(hidden, ops.linear(activated, layer.down))


def write_keys_values(
    ops: Ops,
    config: LayerConfig,
    layer: DecoderLayer,
    x: Tensor,
    cache: LayerCache,
    span: Span,
    rotary: RotaryTable,
) -> LayerCache:
    """Project x [B, T, D] to this layer's keys and values and write them at the span's rows."""
    k = ops.rotary_embedding(_heads(ops, config, ops.linear(x, layer.k), layer.k_norm), rotary)
    v = ops.split_heads(ops.linear(x, layer.v), config.head_dim)
    return ops.kv_cache_update(cache, k, v, span)


def _heads(ops: Ops, config: LayerConfig, x: Tensor, norm: Tensor | None) -> Tensor:
    heads = ops.split_heads(x, config.head_dim)
    return heads if norm is None else ops.rms_norm(heads, norm, config.rms_norm_eps)
