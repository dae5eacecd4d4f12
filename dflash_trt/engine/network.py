"""The two networks of a rank, recorded from the passes that the torch executor runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dflash_trt.engine.bindings import (
    EMBEDDING,
    HEAD,
    Binding,
    Bindings,
    drafter_bindings,
    has_head_input,
    target_bindings,
)
from dflash_trt.engine.config import EngineConfig
from dflash_trt.models.decoder import DecoderLayer
from dflash_trt.models.pair import Caches, Pair
from dflash_trt.ops.base import LayerCache, Linear
from dflash_trt.ops.tensorrt_layers import NetworkTensor
from dflash_trt.ops.tensorrt_ops import NetworkSpan, TensorRTOps
from dflash_trt.ops.tensorrt_plugin_ops import PluginOps

Inputs = Mapping[str, NetworkTensor]


def record_target(ops: TensorRTOps, pair: Pair, config: EngineConfig) -> Bindings:
    """Record the target's pass: tokens -> logits, both models' caches written.

    Args:
        ops: of an empty network; `PluginOps` where the backend of `config` uses plugins.
        pair: a rank's part, its weights on the CPU and in memory until the network is built.
    """
    bindings = target_bindings(config)
    inputs = _add_inputs(ops, bindings)
    rows = ops.layers.count(inputs["tokens"], 1)
    span = _span(ops, config, inputs, inputs["q_len"], rows)
    caches = Caches(
        _layer_caches("target", pair.target_weights.layers, inputs),
        _layer_caches("drafter", pair.drafter_weights.layers, inputs, stacked=config.builder.uses_plugins),
    )
    logits = _shared(pair, inputs).target_pass(ops, inputs["tokens"], inputs["logit_rows"], caches, span)
    ops.layers.output(logits, "logits")
    if isinstance(ops, PluginOps):
        ops.require_written()
        _verify(ops, inputs, logits, config.pretrained_config.vocab_size)
    return bindings


def record_drafter(ops: TensorRTOps, pair: Pair, config: EngineConfig) -> Bindings:
    """Record the drafter's pass: an anchor and a length -> logits of the tokens after it."""
    bindings = drafter_bindings(config)
    inputs = _add_inputs(ops, bindings)
    size = config.speculative_config.block_size
    layers = ops.layers
    zeros = layers.multiply(inputs["kv_len"], layers.integers([0]))  # [B], which is known only when a pass runs
    whole = layers.add(zeros, layers.integers([size]))
    span = _span(ops, config, inputs, whole, layers.integers(list(range(size))))
    caches = _layer_caches("drafter", pair.drafter_weights.layers, inputs)
    block = _block(ops, inputs["anchors"], size, config.speculative_config.mask_token_id)
    logits = _shared(pair, inputs).drafter_pass(ops, block, size - 1, caches, span)
    layers.output(logits, "logits")
    if isinstance(ops, PluginOps):
        first = layers.add(inputs["kv_len"], layers.integers([1]))
        has_own_head = config.speculative_config.has_reduced_vocabulary
        drafts, _, _ = ops.verify(
            logits,
            ops.rows(block, 1, size),
            zeros,
            first,
            inputs["temperature"],
            inputs["seeds"],
            config.pretrained_config.vocab_size,
            whole=has_own_head,
        )
        layers.output(drafts, "drafts")
    return bindings


def _verify(ops: PluginOps, inputs: Inputs, logits: NetworkTensor, vocab_size: int) -> None:
    layers = ops.layers
    rows = layers.gather_rows(inputs["tokens"], inputs["logit_rows"])
    before = layers.subtract(layers.add(inputs["kv_len"], inputs["q_len"]), inputs["draft_len"])
    outputs = ops.verify(logits, rows, inputs["draft_len"], before, inputs["temperature"], inputs["seeds"], vocab_size)
    for output, name in zip(outputs, ("chosen", "accepted", "next"), strict=True):
        layers.output(output, name)


def _add_inputs(ops: TensorRTOps, bindings: Bindings) -> Inputs:
    return {binding.name: _add_input(ops, binding) for binding in bindings.inputs}


def _add_input(ops: TensorRTOps, binding: Binding) -> NetworkTensor:
    shape = tuple(size if isinstance(size, int) else -1 for size in binding.shape)
    return ops.layers.network.add_input(binding.name, ops.layers.data_type(binding.dtype), shape)


def _span(
    ops: TensorRTOps, config: EngineConfig, inputs: Inputs, q_len: NetworkTensor, rows: NetworkTensor
) -> NetworkSpan:
    layers, kv_len = ops.layers, inputs["kv_len"]
    return NetworkSpan(
        slots=inputs.get("slots"),
        positions=layers.add(layers.unsqueeze(kv_len, 1), layers.unsqueeze(rows, 0)),
        extent=config.positions,
        kv_len=kv_len,
        q_len=q_len,
    )


def _layer_caches(
    model: str, layers: Sequence[DecoderLayer], inputs: Inputs, *, stacked: bool = False
) -> list[LayerCache]:
    """Each layer's; where they are stacked, all have the one that holds all layers."""
    prefixes = [model if stacked else f"{model}.{i}" for i in range(len(layers))]
    return [
        LayerCache(inputs[f"{prefix}.keys"], inputs[f"{prefix}.values"], layer.k_scale, layer.v_scale)
        for prefix, layer in zip(prefixes, layers, strict=True)
    ]


def _block(ops: TensorRTOps, anchors: NetworkTensor, size: int, mask_token_id: int) -> NetworkTensor:
    """[B, b]: each anchor, then masks."""
    layers = ops.layers
    first = torch.zeros(1, size, dtype=torch.int32)
    first[0, 0] = 1
    masks = layers.constant((1 - first) * mask_token_id)
    return layers.add(layers.multiply(layers.unsqueeze(anchors, 1), layers.constant(first)), masks)


def _shared(pair: Pair, inputs: Inputs) -> Pair:
    """The pair with the weights that both engines read as inputs; a drafter's own head stays a constant."""
    head: Linear = pair.target_weights.head
    if pair.target.tie_word_embeddings:
        head = Linear(inputs[EMBEDDING])
    elif has_head_input(pair.target) and HEAD in inputs:
        head = Linear(inputs[HEAD])
    weights: Any = replace(pair.target_weights, embedding=inputs[EMBEDDING], head=head)
    return replace(pair, target_weights=weights)
