"""The eager lowering for a device and a type."""

from __future__ import annotations

import logging
from functools import cache

import torch

from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.ops.torch_ops import TorchOps

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
