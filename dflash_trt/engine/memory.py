"""What running an engine will take of a GPU's memory, predicted from the headers of its weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.safetensors_writer import TensorSpec
from dflash_trt.engine.bindings import (
    Binding,
    Bindings,
    Model,
    caches_of,
    drafter_bindings,
    has_head_input,
    shared_weights,
    target_bindings,
)
from dflash_trt.engine.build import Build
from dflash_trt.engine.config import EngineConfig

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head."
_FUSION = re.compile(r"fc\.|hidden_norm\.")
"""The drafter's, which the target's engine runs."""
_CONTEXT = re.compile(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.")
"""The drafter's, which both engines run: the one on context, the other on a block."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU of each rank. What TensorRT takes for itself while it runs is not in here."""

    target_weights: int
    """Constants of the target's engine."""
    drafter_weights: int
    """Constants of the drafter's."""
    shared_weights: int
    """Embedding and head, which both engines are given."""
    caches: int
    inputs_and_outputs: int
    """All others at their largest, logits nearly all of it."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.target_weights + self.drafter_weights + self.shared_weights + self.caches + self.inputs_and_outputs


def engine_bindings(config: EngineConfig) -> dict[Model, Bindings]:
    """Both tables of a rank of a TensorRT engine."""
    plugins = config.builder.uses_plugins
    return {
        "target": target_bindings(config, plugins=plugins),
        "drafter": drafter_bindings(config, plugins=plugins),
    }


def predict_memory(build: Build) -> Memory:
    """Of each rank; all take the same."""
    config = build.config
    shared = shared_weights(config, head=True)
    quantized_head = not config.pretrained_config.tie_word_embeddings and not has_head_input(config.pretrained_config)
    borrows_head = not config.speculative_config.has_reduced_vocabulary
    target, drafter = build.target.specs, build.drafter.specs
    head = [spec for spec in target if spec.name.startswith(_HEAD)] if quantized_head else []
    body = [spec for spec in target if not spec.name.startswith((_EMBEDDING, _HEAD))]
    in_target = [spec for spec in drafter if _FUSION.match(spec.name) or _CONTEXT.match(spec.name)]
    in_drafter = [spec for spec in drafter if not _FUSION.match(spec.name)]
    rotary, drafter_rotary = _rotary_bytes(config)
    tables = engine_bindings(config)
    caches = _caches(config)
    others = sum(
        table.most_elements(binding) * binding.dtype.itemsize
        for table in tables.values()
        for binding in (*table.inputs, *table.outputs)
        if binding.name not in {each.name for each in (*shared, *caches)} and not _is_update(binding, caches)
    )
    return Memory(
        target_weights=_bytes([*body, *head, *in_target]) + rotary,
        drafter_weights=_bytes([*in_drafter, *(head if borrows_head else [])]) + drafter_rotary,
        shared_weights=sum(math.prod(_known(binding)) * binding.dtype.itemsize for binding in shared),
        caches=config.cache_bytes,
        inputs_and_outputs=others,
    )


def _rotary_bytes(config: EngineConfig) -> tuple[int, int]:
    """Tables of cosines and sines in float32: both models' in the target's engine, the drafter's in its own."""
    positions = config.build_config.max_seq_len + config.speculative_config.block_size
    target, drafter = (
        positions * model.head_dim * torch.float32.itemsize
        for model in (config.pretrained_config, config.speculative_config)
    )
    return target + drafter, drafter


def _caches(config: EngineConfig) -> tuple[Binding, ...]:
    plugins = config.builder.uses_plugins
    return (
        *caches_of("target", config, plugins=plugins),
        *caches_of("drafter", config, plugins=plugins, stacked=plugins),
        *caches_of("drafter", config, plugins=plugins),
    )


def _is_update(binding: Binding, caches: Iterable[Binding]) -> bool:
    return binding.is_output and any(binding.name.startswith(cache.name) for cache in caches)


def _known(binding: Binding) -> list[int]:
    return [size for size in binding.shape if isinstance(size, int)]


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)
