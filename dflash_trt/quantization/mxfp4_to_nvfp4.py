"""From MXFP4 to NVFP4 without going through BF16, so that the values stay what they were.

A power of two 2^k is the product of a weight_scale_2 of 2^(k_max - 8) and an e4m3 block scale of 2^(k - k_max + 8),
which e4m3 has for k_max - k from 0 to 17: from 256 down to 2^-9. The codes are then copied. Blocks further down get the
least scale, 2^-9, and are rounded anew. This is ModelOpt's `quantize_mxfp4_to_nvfp4_lossless` in closed form, except
that it turns a code of -0 into one of 0.
"""

from __future__ import annotations

import torch

from dflash_trt.quantization.e2m1 import decode_e2m1, encode_e2m1
from dflash_trt.quantization.mxfp4 import E8M0_BIAS, MXFP4_BLOCK, MXFP4Tensor, check_mxfp4, e8m0_exponents
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK, NVFP4Tensor

EXACT_RANGE = 17
"""How far below the largest exponent a block's may be for its values to be kept exactly."""

_TOP = 8


def largest_exponent(scales: torch.Tensor) -> int:
    """k_max, the largest exponent among the scales.

    A scale byte of 0 marks a block of zeros and does not count; where there is no other, k_max is 0.
    """
    largest = int(scales.max())
    return largest - E8M0_BIAS if largest else 0


def inexact_blocks(scales: torch.Tensor, k_max: int) -> int:
    """How many blocks of 32 the conversion has to round. A scale byte of 0, a block of zeros, does not count."""
    return int(((scales > 0) & (e8m0_exponents(scales) < k_max - EXACT_RANGE)).sum())


def mxfp4_to_nvfp4(quantized: MXFP4Tensor, name: str, k_max: int | None = None) -> NVFP4Tensor:
    """Convert a weight [..., in].

    Args:
        quantized: the weight in MXFP4.
        name: the tensor's name, for messages.
        k_max: the largest exponent of all the weights that share a weight_scale_2 (gate and up); by default
            of this one.

    Raises:
        UserError: the weight is not MXFP4, or holds a NaN.
    """
    check_mxfp4(quantized, name)
    blocks, scales = quantized
    own = largest_exponent(scales)
    top = own if k_max is None else k_max
    if own > top and scales.any():
        raise ValueError(f"tensor {name}: k_max is {k_max}, but a block has the exponent {own}")

    below = top - e8m0_exponents(scales)
    far = below > EXACT_RANGE
    if far.any():
        shifted = decode_e2m1(blocks[far]).ldexp_(EXACT_RANGE - below[far][:, None])
        blocks = blocks.index_put((far,), encode_e2m1(shifted))
    # The table of block scales: 2^8 for exponents at the top, 2^-9 for those at the end of the range and beyond.
    powers = torch.tensor([2.0 ** (_TOP - step) for step in range(EXACT_RANGE + 1)], device=scales.device)
    block_scales = powers[below.clamp(max=EXACT_RANGE)].repeat_interleave(MXFP4_BLOCK // NVFP4_BLOCK, dim=-1)
    return NVFP4Tensor(
        weight=blocks.flatten(-2),
        weight_scale=block_scales.to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor(2.0 ** (top - _TOP), dtype=torch.float32, device=scales.device),
    )
