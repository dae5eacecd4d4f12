"""Qwen3, dense: Llama with an RMS norm on every query and key head."""

from __future__ import annotations

from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.models.llama import TargetWeights, forward, load_decoder
from dflash_trt.models.weights import WeightLoader

__all__ = ["forward", "load"]


def load(loader: WeightLoader, config: TargetConfig) -> TargetWeights:
    """Qwen3's weights by their Hugging Face names."""
    return load_decoder(loader, config, qk_norm=True)
