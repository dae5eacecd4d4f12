"""The pre-norm decoder layer that Llama, Qwen3 and the DFlash drafter share.

h += o(attention(norm(h))); h += down(swiglu(norm(h))). Queries and keys may be normed per head before they are rotated.
Under tensor parallelism each rank has some of the heads and some of the MLP, and o and down give terms of a sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.models.sharding import IN, OUT, Split, kv_heads
from dflash_trt.models.weights import WeightLoader
from dflash_trt.ops.base import LayerCache, Linear, Mask, Ops, RotaryTable, Span, Tensor
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK


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
    q_heads = Split(OUT, "num_attention_heads", config.num_attention_heads)
    shared = kv_heads(config.num_key_value_heads)
    attended = _attended(config, f"{attention}.o_proj")
    ffn_out, ffn_in = (_ffn(config, f"{mlp}.down_proj", axis) for axis in (OUT, IN))
    return DecoderLayer(
        input_norm=loader.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
        q=loader.linear(f"{attention}.q_proj", q_size, hidden, bias=bias, sharding=q_heads),
        k=loader.linear(f"{attention}.k_proj", kv_size, hidden, bias=bias, sharding=shared),
        v=loader.linear(f"{attention}.v_proj", kv_size, hidden, bias=bias, sharding=shared),
        o=loader.linear(f"{attention}.o_proj", hidden, q_size, bias=bias, sharding=attended),
        q_norm=loader.tensor(f"{attention}.q_norm.weight", (head_dim,)) if qk_norm else None,
        k_norm=loader.tensor(f"{attention}.k_norm.weight", (head_dim,)) if qk_norm else None,
        k_scale=loader.scale(f"{attention}.k_proj.k_scale") if fp8_cache else None,
        v_scale=loader.scale(f"{attention}.v_proj.v_scale") if fp8_cache else None,
        post_attention_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate=loader.linear(f"{mlp}.gate_proj", ffn, hidden, bias=mlp_bias, sharding=ffn_out),
        up=loader.linear(f"{mlp}.up_proj", ffn, hidden, bias=mlp_bias, sharding=ffn_out),
        down=loader.linear(f"{mlp}.down_proj", hidden, ffn, bias=mlp_bias, sharding=ffn_in),
    )


def _attended(config: LayerConfig, name: str) -> Split:
    """Inputs of o by heads; where it is NVFP4, by groups of heads that fill whole blocks."""
    heads, blocks = config.num_attention_heads, config.num_attention_heads * config.head_dim // _block(config, name)
    units = math.gcd(heads, blocks)
    dimension = "num_attention_heads" if units == heads else "groups of attention heads that fill NVFP4 blocks"
    return Split(IN, dimension, units)


def _ffn(config: LayerConfig, down: str, axis: int) -> Split:
    """What gate and up compute and down takes, padded with zeros: silu(0) * 0 is 0, and so is what down makes of it."""
    block = _block(config, down)
    return Split(axis, "intermediate_size", config.intermediate_size // block, uneven="pad", unit_size=block)


def _block(config: LayerConfig, name: str) -> int:
    """Inputs of a linear layer that share a scale, and a rank."""
    algo = None if config.quantization is None else config.quantization.algo_of(name)
    return NVFP4_BLOCK if algo in ("NVFP4", "W4A16_NVFP4") else 1


def writes_cache(name: str) -> bool:
    """Whether a tensor of a layer is one that `write_keys_values` reads."""
    return any(f".self_attn.{module}." in name for module in ("k_proj", "v_proj", "k_norm"))


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
    hidden = ops.add(hidden, ops.all_reduce(ops.linear(ops.merge_heads(attended), layer.o)))

    normed = ops.rms_norm(hidden, layer.post_attention_norm, config.rms_norm_eps)
    activated = ops.swiglu(ops.linear(normed, layer.gate), ops.linear(normed, layer.up))
    return ops.add(hidden, ops.all_reduce(ops.linear(activated, layer.down)))


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
