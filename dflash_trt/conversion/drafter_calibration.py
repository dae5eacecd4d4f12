"""A drafter's activations, as it drafts after its target has seen calibration samples.

ModelOpt runs a model alone, but a drafter's inputs are its target's hidden states and the blocks it is to fill. So both
run here as they are served, on operations that watch: largest magnitudes, which is ModelOpt's max calibration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.conversion.calibration import (
    Calibration,
    Progress,
    calibration_dtype,
    checked_amax,
    describe,
    finite_weights,
    not_finite,
)
from dflash_trt.models import dflash
from dflash_trt.models.pair import Caches, Pair, drafter_manifest, load_pair, target_manifest
from dflash_trt.models.sharding import REPLICATED, Sharding
from dflash_trt.models.weights import CheckpointLoader
from dflash_trt.ops.base import LayerCache, Linear, Span
from dflash_trt.ops.torch_ops import TorchOps

_CPU = torch.device("cpu")


def calibrate_drafter(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    samples: list[list[int]],
    modules: Collection[str],
    *,
    kv_cache: bool,
    progress: Progress = lambda count: None,
) -> Calibration:
    """Run samples through the target, draft along each, and take the drafter's largest magnitudes.

    Of every sample the drafter sees all tokens as context, and drafts after its last token and every `block_size`
    tokens before that. Its keys and values are those of the context and of the drafted blocks.

    Args:
        target, drafter: unquantized, seen to belong together. Weights of the target's type stay mapped from the file.
        samples: token ids; one of a single token is context only, as nothing comes before a block at its anchor.
        modules: linear layers of the drafter whose inputs are wanted, `layers.0.mlp.up_proj` or `fc` for two.
        kv_cache: keys and values of every layer, `layers.0.self_attn` for one, are wanted too.
        progress: told of every sample.

    Raises:
        UserError: a checkpoint is damaged, or a layer's input, keys or values are not finite, nothing but zero, or
            were not reached.
    """
    dtype = calibration_dtype(target)
    for manifest in (target_manifest(target), drafter_manifest(drafter)):
        deque(finite_weights(manifest, dtype), maxlen=0)  # refuses before anything is run
    positions = max(map(len, samples), default=0) + drafter.config.block_size
    pair = load_pair(target, drafter, positions=positions, dtype=dtype, device=_CPU)
    loader = _NamingLoader(drafter.weights, lambda tensor: tensor, dtype)
    pair = replace(pair, drafter_weights=dflash.load(loader, drafter.config))
    context = _caches(pair.drafter, positions, dtype)
    caches = Caches(_caches(pair.target, positions, dtype), context)
    attentions = {id(cache): f"layers.{layer}.self_attn" for layer, cache in enumerate(context)}
    ops = _WatchingOps(drafter.path, loader.names, attentions)
    # A head that is not calibrated needs no more than one row.
    drafts = drafter.config.block_size - 1 if "lm_head" in modules else 1
    for ids in samples:
        _draft_along(pair, ops, caches, context, ids, drafts)
        progress(1)
    wanted = attentions.values() if kv_cache else ()
    return Calibration(
        inputs=checked_amax({name: ops.inputs.get(name) for name in modules}, "input", drafter.path),
        keys=checked_amax({name: ops.keys.get(name) for name in wanted}, "keys", drafter.path),
        values=checked_amax({name: ops.values.get(name) for name in wanted}, "values", drafter.path),
        method=describe("largest magnitudes while drafting", dtype, samples),
    )


@torch.inference_mode()
def _draft_along(
    pair: Pair, ops: TorchOps, caches: Caches, context: Sequence[LayerCache], ids: list[int], drafts: int
) -> None:
    first_row = torch.zeros(1, 1, dtype=torch.int64)
    pair.target_pass(ops, torch.tensor([ids]), first_row, caches, _span(0, len(ids)))
    block = torch.full((1, pair.drafter.block_size), pair.drafter.mask_token_id)
    # A block is written over the context from its anchor on, which blocks before it do not see: so from the last to
    # the first, and one pass of the target serves them all.
    for anchor in range(len(ids) - 1, 0, -pair.drafter.block_size):
        block[0, 0] = ids[anchor]
        pair.drafter_pass(ops, block, drafts, context, _span(anchor, pair.drafter.block_size))


def _caches(config: TargetConfig | DrafterConfig, positions: int, dtype: torch.dtype) -> list[LayerCache]:
    shape = (1, config.num_key_value_heads, positions, config.head_dim)
    return [
        LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        for _ in range(config.num_hidden_layers)
    ]


def _span(start: int, rows: int) -> Span:
    return Span(
        slots=torch.tensor([0]),
        positions=torch.arange(start, start + rows)[None],
        extent=start + rows,
        slot_range=slice(0, 1),
    )


@dataclass(frozen=True)
class _NamingLoader(CheckpointLoader):
    """Remembers by which name each linear layer was asked for."""

    names: dict[int, str] = field(default_factory=dict)
    """By the layer's id."""

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
    ) -> Linear:
        linear = super().linear(name, out_features, in_features, bias=bias, sharding=sharding)
        self.names[id(linear)] = name
        return linear


class _WatchingOps(TorchOps):
    """Remembers the largest magnitude, a float32 scalar, of what reaches the drafter's layers and caches.

    Args:
        path: the drafter, for refusals.
        linears: names of linear layers by their ids; others are not watched.
        attentions: names of attention modules by their caches' ids; others are not watched.
    """

    def __init__(self, path: Path, linears: dict[int, str], attentions: dict[int, str]) -> None:
        super().__init__()
        self.path = path
        self.linears = linears
        self.attentions = attentions
        self.inputs: dict[str, Tensor] = {}
        self.keys: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        if id(linear) in self.linears:
            self._watch(self.inputs, "input", self.linears[id(linear)], x)
        return super().linear(x, linear)

    def kv_cache_update(self, cache: LayerCache, keys: Tensor, values: Tensor, span: Span) -> LayerCache:
        if id(cache) in self.attentions:
            self._watch(self.keys, "keys", self.attentions[id(cache)], keys)
            self._watch(self.values, "values", self.attentions[id(cache)], values)
        return super().kv_cache_update(cache, keys, values, span)

    def _watch(self, found: dict[str, Tensor], what: str, name: str, x: Tensor) -> None:
        amax = x.abs().amax().float()
        if not bool(torch.isfinite(amax)):
            raise not_finite(self.path, f"the {what} of {name}", x.dtype)
        found[name] = torch.maximum(found[name], amax) if name in found else amax
