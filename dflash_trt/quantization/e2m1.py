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
    """The codes of the nearest e2m1 values, two a byte, the one of even index in the low nibble.

    Ties go to the even code and magnitudes above 6 to 6, as in ModelOpt's `NVFP4QTensor._cast_fp4`. So do signs: a
    negative value that rounds to zero becomes -0, code 8, while -0.0 itself becomes code 0.

    Args:
        values: float32 or float64 [..., n], n even. A NaN becomes any code.

    Returns:
        uint8 [..., n / 2].
    """
    # Ties are multiples of a quarter. The quarters below and above add up to a value's eighths, which are odd between
    # two quarters however close to one the value is: a byte that says on which side of every tie it lies.
    quarters = values.clamp(-E2M1_MAX, E2M1_MAX).mul_(4)
    eighths = quarters.floor().add_(quarters.ceil_()).to(torch.int8)
    # Of a pair read as one integer, little-endian as every platform here is, the even index is the low byte.
    pairs = eighths.flatten().view(torch.uint16).int()
    packed = _packed_codes(values.device).index_select(0, pairs)
    return packed.view(*values.shape[:-1], values.shape[-1] // 2)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The values of packed codes, exactly: uint8 [..., n] to float32 [..., 2n]."""
    values = _pairs(packed.device).index_select(0, packed.flatten().int()).view(torch.float32)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _packed_codes(device: torch.device) -> torch.Tensor:
    """The packed codes of each pair of eighths: uint8 [65536]."""
    values = torch.arange(256).to(torch.int8) / 8
    distances = (values.abs()[:, None] - torch.tensor(E2M1_VALUES[:8])).abs()
    # Distances that differ do so by a quarter; of equal ones, the even code's shall be the least.
    codes = (distances + torch.arange(8) % 2 / 16).argmin(dim=-1) + 8 * (values < 0)
    return (codes[:, None] << 4 | codes).flatten().to(device, torch.uint8)


@cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two values of each byte, read as one 64-bit integer: one look-up a byte."""
    table = torch.tensor(E2M1_VALUES)
    low, high = table.repeat(16), table.repeat_interleave(16)
    return torch.stack((low, high), dim=-1).view(torch.int64).flatten().to(device)
