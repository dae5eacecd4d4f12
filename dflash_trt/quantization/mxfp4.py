"""MXFP4: e2m1 values and a power of two for every 32 of them, as gpt-oss stores its experts.

OCP Microscaling Formats 1.0, section 5.4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dflash_trt.errors import UserError
from dflash_trt.quantization.amax import block_amax, refuse_uneven, tensor_amax
from dflash_trt.quantization.e2m1 import decode_e2m1, encode_e2m1

MXFP4_BLOCK = 32
E8M0_BIAS = 127
_E8M0_NAN = 255


class MXFP4Tensor(NamedTuple):
    """A quantized weight; the fields are named as the ends of gpt-oss's tensors.

    Attributes:
        blocks: uint8 [..., in / 32, 16], see `encode_e2m1`.
        scales: uint8 [..., in / 32]; the byte k + 127 stands for 2^k (e8m0).
    """

    blocks: torch.Tensor
    scales: torch.Tensor


def check_mxfp4(quantized: MXFP4Tensor, name: str) -> None:
    """Refuse what is not MXFP4, or holds a NaN.

    Raises:
        UserError: naming the tensor and what is wrong with it.
    """
    blocks, scales = quantized
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise UserError(f"tensor {name}: blocks and scales have types {blocks.dtype} and {scales.dtype}, not uint8")
    if blocks.shape != (*scales.shape, MXFP4_BLOCK // 2):
        raise UserError(
            f"tensor {name}: blocks {list(blocks.shape)} and scales {list(scales.shape)} do not belong together; every "
            f"scale has {MXFP4_BLOCK // 2} bytes of blocks"
        )
    broken = int((scales == _E8M0_NAN).sum())
    if broken:
        raise UserError(f"tensor {name}: {broken} of its {scales.numel()} scales are not a number")


def dequantize_mxfp4(quantized: MXFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """e2m1 * 2^k: [..., in].

    The values of transformers' `convert_moe_packed_tensors`, which also transposes: exact, but infinite from 2^128 on.
    """
    return (decode_e2m1(quantized.blocks) * decode_e8m0(quantized.scales)[..., None]).flatten(-2).to(dtype)


def quantize_mxfp4(weight: torch.Tensor, name: str) -> MXFP4Tensor:
    """Quantize a weight in blocks of 32 along its last dimension.

    The scale is the least power of two that keeps the block's magnitudes at 6 or less, 2^ceil(log2(amax / 6)), as
    ModelOpt chooses it; codes are rounded as in `encode_e2m1`.

    Args:
        weight: float32, bfloat16 or float16 [..., in]; in % 32 == 0.
        name: the tensor's name, for messages.

    Raises:
        UserError: the weight has an infinity or a NaN, or does not divide into blocks.
    """
    refuse_uneven(weight, MXFP4_BLOCK, name)
    tensor_amax(weight, name)
    blocks = weight.float().reshape(*weight.shape[:-1], weight.shape[-1] // MXFP4_BLOCK, MXFP4_BLOCK)
    # amax = m * 2^e with m in [0.5, 1), and 6 = 0.75 * 2^3.
    mantissa, exponent = torch.frexp(block_amax(blocks))
    k = (exponent - 3 + (mantissa > 0.75)).clamp(min=-E8M0_BIAS)
    k = k.masked_fill(mantissa == 0, -E8M0_BIAS)
    scales = (k + E8M0_BIAS).to(torch.uint8)
    return MXFP4Tensor(encode_e2m1(blocks / decode_e8m0(scales)[..., None]), scales)


def e8m0_exponents(scales: torch.Tensor) -> torch.Tensor:
    """k of each scale 2^k: uint8 to int32, of the same shape."""
    return scales.int() - E8M0_BIAS


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """2^k of each scale, exactly: uint8 to float32, of the same shape; NaN for 255."""
    return scales.view(torch.float8_e8m0fnu).float()
