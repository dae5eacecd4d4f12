"""The four-bit float e2m1: one sign, two exponent and one mantissa bit, two codes a byte.

The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6; a code is sign << 3 | the magnitude's place in that list (OCP
Microscaling Formats 1.0, section 5.3.3).
"""

from __future__ import annotations

from functools import cache

import torch

E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each code."""


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest e2m1 values.

    Ties go to the even code and magnitudes above 6 to 6, as in ModelOpt's `NVFP4QTensor._cast_fp4`. So do signs: a
    negative value that rounds to zero becomes -0, code 8, while -0.0 itself becomes code 0.

    Args:
        values: float32 or float64, any shape, no NaN.

    Returns:
        uint8 codes below 16, of the same shape.
    """
    # A code counts the steps up to its value: of 0.5 to 2, of 1 from there to 4, of 2 from there to 6. An even count
    # stays even in the sum, so round's ties to even are the code's.
    magnitude = values.abs()
    steps = magnitude.clamp(max=2).mul_(2).round_()
    steps += magnitude.clamp(2, 4).round_()
    steps += magnitude.clamp_(4, 6).mul_(0.5).round_()
    steps.add_(values.sign().clamp_(max=0), alpha=-8)
    # By way of int8, to which conversion is four times as fast.
    return steps.to(torch.int8).sub_(4).view(torch.uint8)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the one of even index in the low nibble: uint8 [..., n], n even, to uint8 [..., n / 2]."""
    # Read as a little-endian pair (every platform here is), the even code is the low byte: shifting lays the odd one
    # beside it, many times as fast as striding over the two.
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The values of packed codes, exactly: uint8 [..., n] to float32 [..., 2n]."""
    values = _pairs(packed.device).index_select(0, packed.flatten().int()).view(torch.float32)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two values of each byte, read as one 64-bit integer: one look-up a byte."""
    table = torch.tensor(E2M1_VALUES)
    low, high = table.repeat(16), table.repeat_interleave(16)
    return torch.stack((low, high), dim=-1).view(torch.int64).flatten().to(device)
