"""What goes in and out of the two engines of a rank: every name, type and shape, once.

A network is made from this table and an executor binds by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.engine.config import EngineConfig
from dflash_trt.models import llama
from dflash_trt.models.sharding import kv_heads, local_shape, vocabulary
from dflash_trt.ops.tensorrt_ops import UPDATED

Size = Literal["batch", "rows", "choices"]
"""Sizes known when an engine runs: B sequences, T tokens of each, R rows of them that a token is chosen for."""
Model = Literal["target", "drafter"]
EMBEDDING, HEAD = "embedding", "head"
"""Weights that both engines read: inputs, bound to one buffer."""


@dataclass(frozen=True)
class Binding:
    """One input or output of an engine."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | Size, ...]
    meaning: str
    is_output: bool = False
    padding: int = 0
    """What rows of a pass hold that belong to no sequence."""


@dataclass(frozen=True)
class Range:
    """Least, most usual and greatest value of a size."""

    least: int
    usual: int
    most: int


Profile = Mapping[Size, Range]


@dataclass(frozen=True)
class Bindings:
    """The table of one engine of one rank."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    profiles: Mapping[str, Profile]
    """In the order that the engine has them; the first one that holds a pass is for it."""

    def most_elements(self, binding: Binding) -> int:
        """Elements of an input or output in the pass that has most of them, under any profile.

        Not the product of the greatest sizes: no profile has the longest prompt chunk and the largest batch.
        """
        return max(
            math.prod(size if isinstance(size, int) else profile[size].most for size in binding.shape)
            for profile in self.profiles.values()
        )


def engine_bindings(config: EngineConfig) -> dict[Model, Bindings]:
    """Both tables of a rank of a TensorRT engine.

    With the plugin, which the backend decides, engines see all slots of the caches and choose tokens too.
    """
    return {"target": target_bindings(config), "drafter": drafter_bindings(config)}


def target_bindings(config: EngineConfig) -> Bindings:
    """Of the engine that runs the target and writes both models' caches."""
    build = config.build_config
    rows: tuple[Size, Size] = ("batch", "rows")
    choices: tuple[Size, Size] = ("batch", "choices")
    caches = (*caches_of("target", config), *caches_of("drafter", config, engine="target"))
    inputs = [
        Binding("tokens", torch.int32, rows, "token ids"),
        _kv_len(config),
        Binding("q_len", torch.int32, ("batch",), "tokens of each row that count"),
        Binding("logit_rows", torch.int32, choices, "rows that a token is chosen for"),
    ]
    outputs = [Binding("logits", build.torch_dtype, (*choices, _vocabulary(config)), "of this rank's tokens", True)]
    if config.builder.uses_plugins:
        inputs += [*_sampling(), Binding("slots", torch.int32, ("batch",), "the cache slot of each row")]
        inputs += [Binding("draft_len", torch.int32, ("batch",), "draft tokens at the end of each row")]
        outputs += _verified()
    inputs += [*shared_weights(config, head=True), *caches]
    return Bindings(tuple(inputs), (*outputs, *map(_updated, caches)), _target_profiles(config))


def drafter_bindings(config: EngineConfig) -> Bindings:
    """Of the engine that drafts a block from an anchor and a length."""
    drafter, build = config.speculative_config, config.build_config
    guesses = drafter.block_size - 1
    own_head = drafter.has_reduced_vocabulary
    vocabulary = config.pretrained_config.vocab_size if own_head else _vocabulary(config)
    caches = caches_of("drafter", config)
    inputs = [
        Binding("anchors", torch.int32, ("batch",), "the last token of each sequence, in no cache yet"),
        _kv_len(config),
    ]
    outputs = [Binding("logits", build.torch_dtype, ("batch", guesses, vocabulary), "of this rank's tokens", True)]
    if config.builder.uses_plugins:
        inputs += [*_sampling(), Binding("slots", torch.int32, ("batch",), "the cache slot of each row")]
        outputs += [Binding("drafts", torch.int32, ("batch", guesses), "draft tokens", True)]
    inputs += [*shared_weights(config, head=not own_head), *caches]
    decode: Profile = {"batch": Range(1, build.max_batch_size, build.max_batch_size)}
    return Bindings(tuple(inputs), (*outputs, *map(_updated, caches)), {"decode": decode})


def caches_of(model: Model, config: EngineConfig, engine: Model | None = None) -> tuple[Binding, ...]:
    """The caches of one model as inputs of an engine, by default its own.

    Native layers see the slots of a pass, one a row, two caches a layer. Plugins see all slots, and in the target's
    engine, which writes them at once, all layers of the drafter's.
    """
    cache = whole_cache(model, config)
    layers, slots, *of_layer = cache.shape
    stacked = config.builder.uses_plugins and (engine or model) != model
    shape: tuple[int | Size, ...] = ("batch", *of_layer)
    if config.builder.uses_plugins:
        shape = (layers if stacked else 1, slots, *of_layer)
    prefixes = [model] if stacked else [f"{model}.{layer}" for layer in range(layers)]
    whose = f"the {model}'s, all layers" if stacked else f"the {model}'s"
    return tuple(
        Binding(f"{prefix}.{kind}", cache.dtype, shape, f"{kind} of {whose}")
        for prefix in prefixes
        for kind in ("keys", "values")
    )


@dataclass(frozen=True)
class WholeCache:
    """All keys of a model on a rank, or all of its values."""

    dtype: torch.dtype
    shape: tuple[int, int, int, int, int]
    """[layers, slots, KV heads, positions, d]"""


def whole_cache(model: Model, config: EngineConfig) -> WholeCache:
    """What a rank allocates for a model twice, whatever part of it an engine sees."""
    build = config.build_config
    of: TargetConfig | DrafterConfig = config.pretrained_config if model == "target" else config.speculative_config
    heads = kv_heads(of.num_key_value_heads).share(build.tp_size)
    shape = (of.num_hidden_layers, build.max_batch_size, heads, config.positions, of.head_dim)
    return WholeCache(config.cache_dtype(of), shape)


def shared_weights(config: EngineConfig, *, head: bool) -> list[Binding]:
    """The embedding and, where it is neither that nor quantized, the target's head."""
    target = config.pretrained_config
    shape = local_shape(
        (target.vocab_size, target.hidden_size), vocabulary(target.vocab_size), config.build_config.tp_size
    )
    dtype = config.build_config.torch_dtype
    shared = [Binding(EMBEDDING, dtype, shape, "rows of the embedding")]
    if head and has_head_input(target):
        shared.append(Binding(HEAD, dtype, shape, "rows of the head"))
    return shared


def has_head_input(target: TargetConfig) -> bool:
    """Whether the target's head is a weight of its own that is not quantized; a quantized one is a constant."""
    quantized = target.quantization is not None and target.quantization.algo_of(llama.HEAD) is not None
    return not target.tie_word_embeddings and not quantized


def _target_profiles(config: EngineConfig) -> dict[str, Profile]:
    build, block = config.build_config, config.speculative_config.block_size
    most = min(build.max_num_tokens, build.max_seq_len)
    one = Range(1, 1, 1)
    batch = Range(1, build.max_batch_size, build.max_batch_size)
    block_rows = Range(1, block, block)
    return {
        "decode": {"batch": batch, "rows": block_rows, "choices": block_rows},
        "prefill": {"batch": one, "rows": Range(1, most, most), "choices": one},
    }


def _kv_len(config: EngineConfig) -> Binding:
    """A row that belongs to no sequence stands past the end of the caches, where kernels write nothing."""
    meaning = "positions already in the caches"
    return Binding("kv_len", torch.int32, ("batch",), meaning, padding=config.positions)


def _sampling() -> list[Binding]:
    return [
        Binding("temperature", torch.float32, ("batch",), "0 is greedy"),
        Binding("seeds", torch.int64, ("batch",), "of the noise"),
    ]


def _verified() -> list[Binding]:
    return [
        Binding("chosen", torch.int32, ("batch", "choices"), "the target's own tokens", True),
        Binding("accepted", torch.int32, ("batch",), "draft tokens that agree with them", True),
        Binding("next", torch.int32, ("batch",), "the target's token after those", True),
    ]


def _updated(cache: Binding) -> Binding:
    return Binding(cache.name + UPDATED, cache.dtype, cache.shape, "bound to its input's buffer", True)


def _vocabulary(config: EngineConfig) -> int:
    size = config.pretrained_config.vocab_size
    return local_shape((size,), vocabulary(size), config.build_config.tp_size)[0]
