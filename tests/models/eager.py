"""Running models directly on TorchOps, without an executor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.models.weights import CheckpointLoader
from dflash_trt.ops.base import LayerCache, Span


def loader(directory: Path) -> CheckpointLoader:
    return CheckpointLoader(SafetensorsWeights(directory), lambda tensor: tensor)


def caches(layers: int, slots: int, kv_heads: int, positions: int, head_dim: int) -> list[LayerCache]:
    shape = (slots, kv_heads, positions, head_dim)
    return [LayerCache(torch.zeros(shape), torch.zeros(shape)) for _ in range(layers)]


def span(starts: list[int], rows: int, slots: list[int] | None = None) -> Span:
    """Rows at `starts` of `slots`, by default the first ones in order."""
    start = torch.tensor(starts)
    return Span(
        slots=torch.tensor(slots if slots is not None else range(len(starts))),
        positions=start[:, None] + torch.arange(rows),
        extent=max(starts) + rows,
        slot_range=slice(0, len(starts)) if slots is None else None,
    )


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)
