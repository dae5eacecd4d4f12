"""What running an engine will take of a GPU's memory, predicted from the headers of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.safetensors_writer import TensorSpec
from dflash_trt.engine.bindings import caches_of, engine_bindings, has_head_input, shared_weights
from dflash_trt.engine.build import Build
from dflash_trt.engine.config import EngineConfig
from dflash_trt.models.dflash import is_fusion, writes_context
from dflash_trt.models.llama import EMBEDDING, HEAD
from dflash_trt.ops.tensorrt_ops import UPDATED


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


def predict_memory(build: Build) -> Memory:
    """Of each rank; all take the same."""
    config = build.config
    quantized_head = not config.pretrained_config.tie_word_embeddings and not has_head_input(config.pretrained_config)
    borrows_head = not config.speculative_config.has_reduced_vocabulary
    target, drafter = build.target.specs, build.drafter.specs
    head = [spec for spec in target if spec.name.startswith(f"{HEAD}.")] if quantized_head else []
    body = [spec for spec in target if not spec.name.startswith((f"{EMBEDDING}.", f"{HEAD}."))]
    in_target = [spec for spec in drafter if writes_context(spec.name)]
    in_drafter = [spec for spec in drafter if not is_fusion(spec.name)]
    rotary, drafter_rotary = _rotary_bytes(config)
    return Memory(
        target_weights=_bytes([*body, *head, *in_target]) + rotary,
        drafter_weights=_bytes([*in_drafter, *(head if borrows_head else [])]) + drafter_rotary,
        shared_weights=_shared_bytes(config),
        caches=config.cache_bytes,
        inputs_and_outputs=_other_bytes(config),
    )


def _other_bytes(config: EngineConfig) -> int:
    """Of inputs and outputs that are neither shared weights nor caches."""
    caches = (*caches_of("target", config), *caches_of("drafter", config), *caches_of("drafter", config, "target"))
    counted = {each.name for each in shared_weights(config, head=True)}
    counted |= {cache.name + end for cache in caches for end in ("", UPDATED)}
    return sum(
        table.most_elements(binding) * binding.dtype.itemsize
        for table in engine_bindings(config).values()
        for binding in (*table.inputs, *table.outputs)
        if binding.name not in counted
    )


def _shared_bytes(config: EngineConfig) -> int:
    """Once, though both engines are given them."""
    target = engine_bindings(config)["target"]
    return sum(target.most_elements(each) * each.dtype.itemsize for each in shared_weights(config, head=True))


def _rotary_bytes(config: EngineConfig) -> tuple[int, int]:
    """Tables of cosines and sines in float32: both models' in the target's engine, the drafter's in its own."""
    target, drafter = (
        config.positions * model.head_dim * torch.float32.itemsize
        for model in (config.pretrained_config, config.speculative_config)
    )
    return target + drafter, drafter


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)
