"""FP8: e4m3 values that share one scale a tensor, as ModelOpt's unified checkpoints hold them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dflash_trt.quantization.amax import tensor_amax

E4M3_MAX = 448.0


class FP8Tensor(NamedTuple):
    """A quantized weight; the fields are named as in a checkpoint.

    Attributes:
        weight: float8_e4m3fn, the shape of the weight.
        weight_scale: float32 scalar.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor


def fp8_scale(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448, a float32 scalar; 1 where that is zero.

    ModelOpt 0.47 writes 0 for a tensor of zeros, and NaN for each of its weights.
    """
    # Not a Python number: CUDA would multiply by its reciprocal, which rounds differently.
    scale = amax.float() / amax.new_tensor(E4M3_MAX, dtype=torch.float32)
    return torch.where(scale == 0, 1.0, scale)


def quantize_fp8(weight: torch.Tensor, name: str) -> FP8Tensor:
    """Quantize a weight: e4m3(weight / weight_scale), the bytes of ModelOpt 0.47's export on a CPU.

    Like it, rounds the quotient to the weight's own type first: BF16 weights are rounded twice.

    Args:
        weight: float32, bfloat16 or float16, any shape.
        name: the tensor's name, for messages.

    Raises:
        UserError: the weight has an infinity or a NaN.
    """
    scale = fp8_scale(tensor_amax(weight, name))
    quantized = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for source, target in zip(_parts(weight.reshape(-1)), _parts(quantized.view(-1)), strict=True):
        target.copy_(_saturated(source, scale).to(weight.dtype))
    return FP8Tensor(quantized, scale)


def dequantize_fp8(quantized: FP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight * weight_scale, computed in float32 and rounded to `dtype`; the shape of the weight."""
    return (decode_e4m3(quantized.weight) * quantized.weight_scale).to(dtype)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn to float32, exactly; on a CPU at least twice as fast as `codes.float()`."""
    return _e4m3_values(codes.device).index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def fake_quantize_fp8(x: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """What an activation is after FP8 and back: e4m3(clip(x / input_scale, -448, 448)) * input_scale.

    The formula of TensorRT's Quantize and Dequantize layers ("Quantization Schemes" in its documentation).

    Args:
        x: floating-point, any shape.
        input_scale: float32 scalar, positive.

    Returns:
        The shape and type of x.
    """
    return (decode_e4m3(_saturated(x, input_scale).to(torch.float8_e4m3fn)) * input_scale).to(x.dtype)


@cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _saturated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, clipped: older torch casts what is too large for e4m3 to NaN."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / scale).clamp_(-E4M3_MAX, E4M3_MAX)


def _parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """On a CPU, parts whose intermediate results stay in its second-level cache."""
    return torch.split(flat, 1 << 17 if flat.is_cpu else len(flat))
