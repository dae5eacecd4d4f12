"""e4m3 in kernels: what an FP8 cache holds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_codes(x):
    """Float32 as e4m3, clipped to +-448, ties to even, NaN kept: the codes as uint8. In integers, so on every GPU."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    near = size.to(tl.int32, bitcast=True)
    normal = ((near + 0x7FFFF + ((near >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count in steps of 2^-9, which is the last place of 2^14 in float32.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes, dtype: tl.constexpr):
    """Keys or values as they are multiplied; codes of e4m3 without their scale, which is applied to sums."""
    if codes.dtype == tl.uint8:
        # In the fields of float32, e4m3 is 2^-120 times itself, subnormals included.
        bits = codes.to(tl.int32)
        wide = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        decoded = tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(dtype)
    else:
        decoded = codes.to(dtype)
    return decoded
