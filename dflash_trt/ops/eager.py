"""The eager lowering for a device and a type."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.plugins import noise

_LOG = logging.getLogger(__name__)


def eager_ops(
    device: torch.device, dtype: torch.dtype, *, quantizes_activations: bool = False, ranks: Ranks = ALONE
) -> TorchOps:
    """Our kernels on a CPU that has what they need; torch on GPUs and in float64.

    Args:
        dtype: of what is not quantized.
    """
    if device.type != "cpu" or dtype == torch.float64 or not _has_kernels():
        return TorchOps(quantizes_activations=quantizes_activations, ranks=ranks)
    from dflash_trt.ops.cpu.ops import CPUOps

    return CPUOps(quantizes_activations=quantizes_activations, ranks=ranks)


def gumbel(seeds: Tensor, positions: Tensor, tokens: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """See `plugins.noise.gumbel`: the same bits everywhere."""
    if seeds.device.type != "cpu" or not _has_kernels():
        of_torch: Tensor = noise.gumbel(seeds, positions, tokens, dtype, first)
        return of_torch
    from dflash_trt.ops.cpu.noise import gumbel

    return gumbel(seeds, positions, tokens, dtype, first)


@cache
def _has_kernels() -> bool:
    try:
        from dflash_trt.ops.cpu.vector import supported
    except ImportError:
        _LOG.warning("llvmlite is not installed: torch runs all of a model, slower, and batches change last bits")
        return False
    if not supported():
        _LOG.warning("this processor lacks AVX2, FMA or F16C: torch runs all of a model, and batches change last bits")
    return supported()
