"""What an engine directory's config.json holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.engine.tensorrt_api import TensorRTName
from dflash_trt.errors import UserError
from dflash_trt.models.sharding import kv_heads
from dflash_trt.models.weights import PACKED_DTYPES

Dtype = Literal["float64", "float32", "bfloat16", "float16"]
Backend = Literal["torch", "tensorrt_rtx", "tensorrt"]


@dataclass(frozen=True)
class BuildConfig:
    """What a user chooses when building."""

    dtype: Dtype
    """Type of computation, and of weights and caches that are not quantized."""
    max_batch_size: int = 8
    """Sequences decoded together: slots of the caches."""
    max_seq_len: int = 2048
    """Prompt and output tokens of a sequence together."""
    max_num_tokens: int = 512
    """Tokens of a prompt that one pass takes."""
    tp_size: int = 1
    """Ranks that run the engine together, each with its part of the weights."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return cast(torch.dtype, getattr(torch, self.dtype))

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "max_num_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, it must be 1 or more")
        if self.max_seq_len < 2:
            raise UserError(
                f"max_seq_len is {self.max_seq_len}, it must be 2 or more: a prompt token and an output token"
            )


def checkpoint_dtype(weights: Weights) -> Dtype:
    """The type that a checkpoint's unquantized matrices have, the embedding among them.

    Raises:
        UserError: they have several, or one that is not for computing.
    """
    found = {
        str(weights.dtype(name)).removeprefix("torch.")
        for name in weights.names()
        if len(weights.shape(name)) == 2 and weights.dtype(name) not in PACKED_DTYPES.values()
    }
    if len(found) != 1 or not found <= set(get_args(Dtype)):
        choices, types = ", ".join(get_args(Dtype)), ", ".join(sorted(found)) or "quantized, all of them"
        raise UserError(
            f"{weights.path}: its matrices are {types}, not of one of the types {choices}; build one with --dtype"
        )
    return cast(Dtype, found.pop())


def capability_number(compute_capability: str) -> int:
    """103 for sm103.

    Raises:
        UserError: it is not written so.
    """
    matched = re.fullmatch(r"sm(\d+)", compute_capability)
    if matched is None:
        raise UserError(f"compute_capability is {compute_capability}, it must be sm and a number, sm120 for one")
    return int(matched[1])


@dataclass(frozen=True)
class Builder:
    """What built an engine, and with what."""

    backend: Backend
    version: str
    """Version of the library that the backend stands on."""
    compute_capability: str | None = None
    """Of the GPU that TensorRT's engines are for; sm120 is 12.0."""
    plugin_hash: str | None = None
    """Of the plugin whose kernels are in the engines."""

    @property
    def tensorrt(self) -> TensorRTName | None:
        """Which TensorRT built the engines, where the directory holds engines rather than weights."""
        return None if self.backend == "torch" else self.backend

    @property
    def gpu(self) -> int:
        """The compute capability of a TensorRT engine's GPU as a number, 103 for sm103.

        Raises:
            UserError: config.json has none.
        """
        return capability_number(self.compute_capability or "none")

    @property
    def uses_plugins(self) -> bool:
        """Whether the networks have our plugin's operations."""
        return self.backend == "tensorrt"


_ALIGNED = 16
"""Positions of a head of 16 numbers of a byte each, the smallest that there are, are 256 bytes."""


@dataclass(frozen=True)
class EngineConfig:
    """All of config.json."""

    version: str
    """Version of dflash-trt that wrote it."""
    pretrained_config: TargetConfig
    speculative_config: DrafterConfig
    build_config: BuildConfig
    builder: Builder
    build_id: str
    """What the weight files of one build, and of no other, have in common."""

    @property
    def positions(self) -> int:
        """Of each slot of the caches: a sequence's, and a block that is written past its end before it is cut.

        For TensorRT rounded up, so that every slot begins at a multiple of 256 bytes, as addresses given to it must.
        """
        positions = self.build_config.max_seq_len + self.speculative_config.block_size
        return positions if self.builder.tensorrt is None else -(-positions // _ALIGNED) * _ALIGNED

    def cache_dtype(self, model: TargetConfig | DrafterConfig) -> torch.dtype:
        """The type of one of the two models' cached keys and values."""
        fp8 = model.quantization is not None and model.quantization.kv_cache_quant_algo == "FP8"
        return torch.float8_e4m3fn if fp8 else self.build_config.torch_dtype

    @property
    def cache_bytes(self) -> int:
        """Bytes of both models' caches on each rank, allocated once when an engine is loaded.

        max_batch_size x positions x bytes per token, which are the sum over target and drafter of
        2 (a key and a value) x num_hidden_layers x a rank's key-value heads x head_dim x bytes of a number: one where
        the model's own `kv_cache_quant_algo` is FP8, else those of `dtype`.
        """
        build = self.build_config
        per_token = sum(
            2
            * model.num_hidden_layers
            * kv_heads(model.num_key_value_heads).share(build.tp_size)
            * model.head_dim
            * self.cache_dtype(model).itemsize
            for model in (self.pretrained_config, self.speculative_config)
        )
        return build.max_batch_size * self.positions * per_token
