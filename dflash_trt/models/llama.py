"""Llama: token embedding, pre-norm decoder layers, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.models.decoder import DecoderLayer, load_layer, run_layer
from dflash_trt.models.sharding import vocabulary
from dflash_trt.models.weights import WeightLoader
from dflash_trt.ops.base import LayerCache, Linear, Ops, RotaryTable, Span, Tensor

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
"""The modules that have a row for each token; a tied target's head is its embedding."""


@dataclass(frozen=True)
class TargetWeights:
    """A target's weights; a tied head is the embedding itself, held once."""

    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear


def load(loader: WeightLoader, config: TargetConfig) -> TargetWeights:
    """Llama's weights by their Hugging Face names."""
    return load_decoder(loader, config, qk_norm=False)


def load_decoder(loader: WeightLoader, config: TargetConfig, *, qk_norm: bool) -> TargetWeights:
    """The weights of Llama, or of a family that differs from it by norms on query and key heads."""
    table, tokens = (config.vocab_size, config.hidden_size), vocabulary(config.vocab_size)
    embedding = loader.tensor(f"{EMBEDDING}.weight", table, tokens)
    if config.tie_word_embeddings:
        loader.ignore(f"{HEAD}.weight")
    return TargetWeights(
        embedding=embedding,
        layers=tuple(
            load_layer(loader, f"model.layers.{i}", config, qk_norm=qk_norm, mlp_bias=config.mlp_bias)
            for i in range(config.num_hidden_layers)
        ),
        norm=loader.tensor("model.norm.weight", (config.hidden_size,)),
        head=Linear(embedding) if config.tie_word_embeddings else loader.linear(HEAD, *table, sharding=tokens),
    )


def forward(
    ops: Ops,
    config: TargetConfig,
    weights: TargetWeights,
    tokens: Tensor,
    caches: Sequence[LayerCache],
    span: Span,
    rotary: RotaryTable,
    taps: Sequence[int],
) -> tuple[Tensor, list[Tensor]]:
    """Run tokens [B, T] at the span's rows, writing their keys and values into the caches.

    Returns:
        The normed last hidden states [B, T, D], and for each layer of `taps` what drafters are trained on, Hugging
        Face's `hidden_states[tap + 1]`: the residual stream after that layer, after the last one with its norm.
    """
    hidden = ops.embedding(tokens, weights.embedding)
    mask = ops.attention_mask(span, causal=True, window=None)
    rows = ops.rotary_rows(rotary, span)
    states = {}
    for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
        hidden = run_layer(ops, config, layer, hidden, cache, span, rows, mask)
        states[index] = hidden
    states[len(weights.layers) - 1] = ops.rms_norm(hidden, weights.norm, config.rms_norm_eps)
    return states[len(weights.layers) - 1], [states[tap] for tap in taps]
