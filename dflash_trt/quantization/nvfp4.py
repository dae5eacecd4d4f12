"""NVFP4: e2m1 values, an e4m3 scale for every 16 of them and a float32 scale for the tensor.

value = e2m1 * weight_scale * weight_scale_2. The layout and the bytes are those of ModelOpt 0.47's unified checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import threshold

from dflash_trt.quantization.amax import block_amax, refuse_uneven, tensor_amax
from dflash_trt.quantization.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1
from dflash_trt.quantization.fp8 import E4M3_MAX, FP8Tensor, decode_e4m3, dequantize_fp8

NVFP4_BLOCK = 16
E4M3_MIN = 2.0**-9
"""The least positive e4m3 value."""

_SMALLEST = 2.0**-149
_BLOCKS_AT_ONCE = {"cpu": 1 << 13, "cuda": 1 << 22}
"""On a CPU, as many as keep their intermediate results in its second-level cache."""


class NVFP4Tensor(NamedTuple):
    """A quantized weight; the fields are named as in a checkpoint.

    Attributes:
        weight: uint8 [..., in / 2], see `encode_e2m1`.
        weight_scale: float8_e4m3fn [..., in / 16].
        weight_scale_2: float32 scalar.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor


def nvfp4_scale_2(amax: torch.Tensor) -> torch.Tensor:
    """amax / (6 * 448), a float32 scalar; 1 where that is zero.

    Of layers that run as one (q, k and v; gate and up), amax is the largest among their weights. ModelOpt 0.47 writes 0
    for a tensor of zeros, and NaN for each of its block scales.
    """
    # Not a Python number: CUDA would multiply by its reciprocal, which rounds differently.
    scale = amax.float() / amax.new_tensor(E2M1_MAX * E4M3_MAX, dtype=torch.float32)
    return torch.where(scale == 0, 1.0, scale)


def quantize_nvfp4(weight: torch.Tensor, name: str, weight_scale_2: torch.Tensor | None = None) -> NVFP4Tensor:
    """Quantize a weight in blocks of 16 along its last dimension, in float32.

    weight_scale = e4m3(clip(block_amax / (6 * weight_scale_2), 2^-9, 448)), 1 for a block of zeros;
    weight = e2m1(weight / (weight_scale * weight_scale_2)).

    Args:
        weight: float32, bfloat16 or float16 [..., in]; in % 16 == 0.
        name: the tensor's name, for messages.
        weight_scale_2: float32 scalar on the weight's device, as `nvfp4_scale_2` gives it for all the weights that
            share it; by default for this weight alone.

    Raises:
        UserError: the weight has an infinity or a NaN, or does not divide into blocks.
    """
    refuse_uneven(weight, NVFP4_BLOCK, name)
    blocks = weight.reshape(-1, NVFP4_BLOCK)
    amaxes = torch.cat([block_amax(part) for part in _parts(blocks)])
    largest = amaxes.max()
    amax = largest if torch.isfinite(largest) else tensor_amax(weight, name)  # which refuses the weight
    scale_2 = nvfp4_scale_2(amax) if weight_scale_2 is None else weight_scale_2
    scales = threshold(amaxes / (E2M1_MAX * scale_2), 0.0, 1.0).clamp_(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    # Where the product underflows, the block is zeros whatever its codes; ModelOpt casts x / 0 there, and 0 / 0.
    divisors = dequantize_fp8(FP8Tensor(scales, scale_2)).clamp_(min=_SMALLEST)[:, None]
    packed = torch.empty(len(blocks), NVFP4_BLOCK // 2, dtype=torch.uint8, device=weight.device)
    for source, divisor, target in zip(_parts(blocks), _parts(divisors), _parts(packed), strict=True):
        target.copy_(encode_e2m1(source / divisor))
    leading = weight.shape[:-1]
    return NVFP4Tensor(packed.view(*leading, -1), scales.view(*leading, -1), scale_2)


def dequantize_nvfp4(quantized: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """e2m1 * (weight_scale * weight_scale_2), computed in float32 and rounded to `dtype`; [..., in]."""
    scale = decode_e4m3(quantized.weight_scale) * quantized.weight_scale_2
    values = decode_e2m1(quantized.weight)
    blocks = values.view(*scale.shape, NVFP4_BLOCK)
    return blocks.mul_(scale[..., None]).view(values.shape).to(dtype)


def fake_quantize_nvfp4(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """What an activation is after TensorRT's DynamicQuantize, with `input_scale` as its double scale, and back.

    scale = e4m3(min(block_amax / (6 * input_scale), 448)); e2m1(x / (scale * input_scale)) * (scale * input_scale).
    Unlike a weight's, a block's scale may round to zero; its values are then zero. All in float32: as of `encode_fp8`,
    the last bits of a sum in float64 decide nothing.

    Args:
        x: floating-point [..., in]; in % 16 == 0.
        input_scale: float32 scalar, positive.

    Returns:
        The shape and type of x.
    """
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK)
    scale = (block_amax(blocks) / (E2M1_MAX * input_scale)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    divisor = (decode_e4m3(scale) * input_scale)[..., None]
    packed = encode_e2m1(blocks / divisor.clamp(min=_SMALLEST))
    return (decode_e2m1(packed) * divisor).flatten(-2).to(x.dtype)


def _parts(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(blocks, _BLOCKS_AT_ONCE[blocks.device.type])
