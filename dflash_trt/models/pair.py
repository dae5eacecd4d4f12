"""A target and its drafter as they run: the two passes that every backend executes.

The target's pass writes both caches. It taps its own hidden states, fuses them, and writes the drafter's context keys
and values at the same positions as its own, so the two caches always have one length, hidden states never leave the
pass, and rolling back is setting a length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.target import Architecture, TargetConfig
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.models import dflash, llama, qwen3
from dflash_trt.models.dflash import DrafterWeights
from dflash_trt.models.llama import TargetWeights
from dflash_trt.models.rotary import rotary_table
from dflash_trt.models.weights import CheckpointLoader, Manifest, WeightLoader
from dflash_trt.ops.base import LayerCache, Ops, RotaryTable, Span, Tensor

FAMILIES: dict[Architecture, ModuleType] = {"LlamaForCausalLM": llama, "Qwen3ForCausalLM": qwen3}


@dataclass(frozen=True)
class Caches:
    """Both models' caches, one entry a layer."""

    target: Sequence[LayerCache]
    drafter: Sequence[LayerCache] | None
    """None where the drafter does not run: no context is written for it."""


@dataclass(frozen=True)
class Pair:
    """Configs, weights and rotary tables of a target and its drafter."""

    target: TargetConfig
    drafter: DrafterConfig
    target_weights: TargetWeights
    drafter_weights: DrafterWeights
    target_rotary: RotaryTable
    drafter_rotary: RotaryTable

    def target_pass(self, ops: Ops, tokens: Tensor, logit_rows: Tensor, caches: Caches, span: Span) -> Tensor:
        """Run tokens [B, T], write the caches, and give the logits [B, R, V] of rows `logit_rows` [B, R].

        Of a rank, those of its part of the vocabulary, padding included.
        """
        hidden, features = FAMILIES[self.target.architecture].forward(
            ops,
            self.target,
            self.target_weights,
            tokens,
            caches.target,
            span,
            self.target_rotary,
            () if caches.drafter is None else self.drafter.target_layer_ids,
        )
        if caches.drafter is not None:
            dflash.write_context(
                ops, self.drafter, self.drafter_weights, features, caches.drafter, span, self.drafter_rotary
            )
        return ops.linear(ops.select_rows(hidden, logit_rows), self.target_weights.head)

    def drafter_pass(self, ops: Ops, block: Tensor, count: int, caches: Sequence[LayerCache], span: Span) -> Tensor:
        """Logits [B, count, V] over the target's vocabulary for the tokens after the anchor of `block` [B, b].

        Of a rank, as `target_pass`, unless the drafter has its own head: that is replicated, and so are its logits.
        """
        own = self.drafter_weights
        logits = dflash.draft(
            ops,
            self.drafter,
            own,
            self.target_weights.embedding,
            self.target_weights.head if own.head is None else own.head,
            block,
            count,
            caches,
            span,
            self.drafter_rotary,
        )
        if own.offsets is None:
            return logits
        return ops.expand_vocabulary(logits, own.offsets, self.target.vocab_size)


def load_pair(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    *,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int = 1,
) -> Pair:
    """A pair as it runs, of two checkpoints or of an engine's two parts.

    Args:
        target, drafter: seen to belong together, and by their manifests to be what their configs say.
        positions: what rotary tables reach to, of the caches that the pair will run on.
        dtype: what unquantized weights become; those that have it, and all quantized ones, stay mapped on a CPU.
        device: where it will run.
        ranks: of how many ranks these are one's parts.

    Raises:
        UserError: a tensor is not what the model asks for, or a file cannot be read.
    """

    def loader(weights: Weights) -> CheckpointLoader:
        return CheckpointLoader(weights, lambda tensor: tensor.to(device), dtype, ranks)

    return Pair(
        target=target.config,
        drafter=drafter.config,
        target_weights=load_target(loader(target.weights), target.config),
        drafter_weights=dflash.load(loader(drafter.weights), drafter.config),
        target_rotary=rotary_table(target.config.rope, positions, dtype, device),
        drafter_rotary=rotary_table(drafter.config.rope, positions, dtype, device),
    )


def load_target(loader: WeightLoader, config: TargetConfig) -> TargetWeights:
    """The weights of a target of any supported family."""
    load: Callable[[WeightLoader, TargetConfig], TargetWeights] = FAMILIES[config.architecture].load
    return load(loader, config)


def target_manifest(checkpoint: TargetCheckpoint, ranks: int = 1) -> Manifest:
    """The tensors that a target's model reads, seen in the headers to be there and to fit its config.

    Args:
        checkpoint: its config is the whole model's.
        ranks: of how many ranks its weights are one's.

    Raises:
        UserError: one is missing or has another shape or type, or a tensor has no place in the model.
    """
    manifest = Manifest(checkpoint.weights, checkpoint.config.quantization, ranks)
    load_target(manifest, checkpoint.config)
    manifest.refuse_unread()
    return manifest


def drafter_manifest(checkpoint: DrafterCheckpoint, ranks: int = 1) -> Manifest:
    """As `target_manifest`, of a drafter."""
    manifest = Manifest(checkpoint.weights, checkpoint.config.quantization, ranks)
    dflash.load(manifest, checkpoint.config)
    manifest.refuse_unread()
    return manifest
