"""The DFlash drafter: a block of tokens in one pass, conditioned on the target's hidden states.

Its layers are Qwen3-style whatever the target is. Context reaches them only as keys and values: the target's tapped
states are fused into one vector c a token, and every layer projects c with the same weights that project its own block
(the DFlash paper's "KV injection"). So the drafter's cache is written by the target's pass, and a draft needs nothing
but an anchor token and a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.models.decoder import DecoderLayer, load_layer, run_layer, write_keys_values, writes_cache
from dflash_trt.models.llama import EMBEDDING, HEAD
from dflash_trt.models.weights import WeightLoader
from dflash_trt.ops.base import LayerCache, Linear, Mask, Ops, RotaryTable, Span, Tensor


@dataclass(frozen=True)
class DrafterWeights:
    """A drafter's own weights; head and offsets are None where it borrows the target's head."""

    fc: Linear
    hidden_norm: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear | None
    offsets: Tensor | None
    """[R] row i of the drafter's own head stands for the target's token i + `offsets[i]`."""


def load(loader: WeightLoader, config: DrafterConfig) -> DrafterWeights:
    """The drafter's weights by the names both checkpoint formats share.

    `fc` is replicated, as the residual stream is whose states it fuses; so is the small head of a reduced vocabulary.
    """
    hidden = config.hidden_size
    own_head = (config.draft_vocab_size or 0, hidden) if config.has_reduced_vocabulary else None
    if config.format == "speculators":
        for name in (*copies_of_target(config), "verifier_norm.weight", "t2d", "d2t"):
            loader.ignore(name)
    return DrafterWeights(
        fc=loader.linear("fc", hidden, len(config.target_layer_ids) * hidden),
        hidden_norm=loader.tensor("hidden_norm.weight", (hidden,)),
        layers=tuple(load_layer(loader, f"layers.{i}", config, qk_norm=True) for i in range(config.num_hidden_layers)),
        norm=loader.tensor("norm.weight", (hidden,)),
        head=None if own_head is None else loader.linear("lm_head", *own_head),
        offsets=None if own_head is None else loader.integers("d2t", own_head[:1]),
    )


def copies_of_target(config: DrafterConfig) -> dict[str, str]:
    """Tensors that a speculators file may store though a drafter reads the target's, and the names of those.

    They are its embedding and, at full vocabulary, its head. The z-lab format stores neither.
    """
    if config.format != "speculators":
        return {}
    head = {} if config.has_reduced_vocabulary else {"lm_head.weight": f"{HEAD}.weight"}
    return {"embed_tokens.weight": f"{EMBEDDING}.weight", **head}


def is_fusion(name: str) -> bool:
    """Whether a tensor is one that makes a context of the target's states, which only the target's pass does."""
    return name.startswith(("fc.", "hidden_norm."))


def writes_context(name: str) -> bool:
    """Whether a tensor is one that `write_context` reads, so that the target's pass has it, be it the drafter's too."""
    return is_fusion(name) or writes_cache(name)


def write_context(
    ops: Ops,
    config: DrafterConfig,
    weights: DrafterWeights,
    features: Sequence[Tensor],
    caches: Sequence[LayerCache],
    span: Span,
    rotary: RotaryTable,
) -> None:
    """Write every layer's context keys and values for the target's tapped states [B, T, D] at the span's rows."""
    context = ops.rms_norm(ops.linear(ops.concat(features), weights.fc), weights.hidden_norm, config.rms_norm_eps)
    rows = ops.rotary_rows(rotary, span)
    for layer, cache in zip(weights.layers, caches, strict=True):
        write_keys_values(ops, config, layer, context, cache, span, rows)


def draft(
    ops: Ops,
    config: DrafterConfig,
    weights: DrafterWeights,
    embedding: Tensor,
    head: Linear,
    block: Tensor,
    count: int,
    caches: Sequence[LayerCache],
    span: Span,
    rotary: RotaryTable,
) -> Tensor:
    """Logits [B, count, R] of the tokens after the anchor; row j guesses the token j + 1 positions after it.

    Where the head is divided among ranks, these are logits of this rank's part.

    Args:
        block: [B, b] the anchor followed by mask tokens; always whole, since a shorter block would hold other guesses.
        count: rows that go through the head, 1..b - 1.
        caches: one a layer, holding context up to the anchor. The block's own keys and values are written past it,
            where the target's next pass overwrites them.
    """
    hidden = ops.embedding(block, embedding)
    if config.input_embedding_scale != 1.0:
        hidden = ops.scale(hidden, config.input_embedding_scale)
    rows = ops.rotary_rows(rotary, span)
    masks: dict[object, Mask] = {
        kind: ops.attention_mask(span, causal=kind.is_causal, window=kind.window) for kind in set(config.layers)
    }
    for kind, layer, cache in zip(config.layers, weights.layers, caches, strict=True):
        hidden = run_layer(ops, config, layer, hidden, cache, span, rows, masks[kind])
    hidden = ops.rms_norm(ops.rows(hidden, 1, 1 + count), weights.norm, config.rms_norm_eps)
    return _logits(ops, config, hidden, head)


def _logits(ops: Ops, config: DrafterConfig, hidden: Tensor, head: Linear) -> Tensor:
    logits = ops.linear(hidden, head)
    if config.output_multiplier != 1.0:
        logits = ops.scale(logits, config.output_multiplier)
    if config.final_logit_softcapping is not None:
        logits = ops.soft_cap(logits, config.final_logit_softcapping)
    return logits
