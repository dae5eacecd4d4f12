"""Tables of the rotary position embedding."""

from __future__ import annotations

import torch

from dflash_trt.checkpoint.rope import RopeConfig, attention_scaling, inverse_frequencies
from dflash_trt.ops.base import RotaryTable


def rotary_table(rope: RopeConfig, positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    """Cosines and sines [positions, d / 2] for positions 0.. of a cache.

    Angles are float32 products, whatever `dtype` is: every checkpoint was trained with those, and at position 8,000
    they differ from exact ones by up to 6e-4.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    scaling = attention_scaling(rope)
    cos, sin = (part.mul(scaling).to(device, dtype) for part in (angles.cos(), angles.sin()))
    return RotaryTable(cos, sin)
