"""FP8: e4m3 values that share one scale a tensor, as ModelOpt's unified checkpoints hold them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from dflash_trt.quantization.amax import tensor_amax

E4M3_MAX = 448.0
E4M3_IN_FLOAT16 = 2.0**-8
"""What `e4m3_in_float16` multiplies values by."""
_MANY = 1 << 16
"""On a CPU, the least number of codes that are decoded faster by shifting than by looking each up."""


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
    for source, target in zip(_parts(weight), _parts(quantized), strict=True):
        # From float32, whose conversion to e4m3 is vectorized; float16's takes eight times as long.
        target.copy_(_saturated(source, scale).to(weight.dtype).float())
    return FP8Tensor(quantized, scale)


def dequantize_fp8(quantized: FP8Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight * weight_scale, computed in float32 and rounded to `dtype`; the shape of the weight.

    Exact for scales below 2^120, of which amax / 448 always is one.
    """
    codes, scale = quantized
    if not codes.is_cpu or codes.numel() < _MANY:
        return (decode_e4m3(codes) * scale).to(dtype)
    values = torch.empty(codes.shape, dtype=torch.float32)
    for source, target in zip(_parts(codes), _parts(values), strict=True):
        if _has_nan(source):
            torch.mul(decode_e4m3(source), scale, out=target)
        else:
            target.copy_(e4m3_in_float16(source)).mul_(scale / E4M3_IN_FLOAT16)
    return values.to(dtype)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn of any shape to float32, exactly. `dequantize_fp8` is faster where they are many."""
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
    return dequantize_fp8(FP8Tensor(encode_fp8(x, input_scale), input_scale), x.dtype)


def encode_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(clip(x / scale, -448, 448)), of x's shape, in float32; NaN stays NaN.

    Float64 is rounded to float32 first: where x / scale is halfway between two codes, as codes over a commensurate
    scale often are, the last bits of the sum that x came from would decide.
    """
    return _saturated(x, scale).to(torch.float8_e4m3fn)


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether 0x7F, the largest of signed bytes, or 0xFF, the largest of unsigned ones, is among the codes."""
    return int(codes.view(torch.int8).max()) == 0x7F or int(codes.view(torch.uint8).max()) == 0xFF


def e4m3_in_float16(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes that are not NaN, times `E4M3_IN_FLOAT16`, exactly: float8_e4m3fn to float16.

    The fields of e4m3 are the upper ones of float16, subnormals included, but for a bias of 7, not 15: a few times as
    fast as a conversion.
    """
    bits = codes.view(torch.int8).to(torch.int16).mul_(1 << 7)
    # The sign has moved into the uppermost bit of the exponent as well.
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16)


@cache
def _e4m3_values(device: torch.device) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


def _saturated(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale in float32, clipped: older torch casts what is too large for e4m3 to NaN."""
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its values in order; on a CPU in parts whose intermediate results stay in its second-level cache."""
    return torch.split(tensor.reshape(-1), 1 << 17) if tensor.is_cpu else (tensor,)
