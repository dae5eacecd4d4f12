"""How numbers are stored, and how kernels read 16 of them at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dflash_trt.ops.cpu.kernel import F32, I8, I16, I32, Emitter, Value
from dflash_trt.ops.cpu.vector import (
    WIDTH,
    clipped,
    copysign,
    fabs,
    float_to_half,
    half_to_float,
    load,
    picked,
    splat,
    store,
    vector,
)
from dflash_trt.quantization.e2m1 import E2M1_MAX
from dflash_trt.quantization.fp8 import E4M3_MAX

E4M3_EXPONENT = -8
"""Kernels read e4m3 as float16 with its bits in the upper places: 2^-8 times the value, subnormals included."""
E2M1_EXPONENT = -14
"""The same of e2m1."""


class Row(Protocol):
    """A row of numbers in memory."""

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """Numbers start..start + 15 as float32, `start` a multiple of 16; zeros where a mask says so."""


@dataclass(frozen=True)
class FloatRow:
    """Float32."""

    address: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`."""
        return load(e, e.at(self.address, start, 4), F32, mask)

    def write(self, e: Emitter, start: Value, value: Value, mask: Value | None = None) -> None:
        """Store 16 numbers from `start` on, or those that a mask has, rounded to the nearest."""
        store(e, value, e.at(self.address, start, 4), mask)


@dataclass(frozen=True)
class BFloat16Row:
    """BF16: the upper half of float32."""

    address: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`."""
        bits = e.b.zext(load(e, e.at(self.address, start, 2), I16, mask), vector(I32))
        return e.b.bitcast(e.b.shl(bits, splat(e, I32(16))), vector(F32))

    def write(self, e: Emitter, start: Value, value: Value, mask: Value | None = None) -> None:
        """See `FloatRow`."""
        bits = e.b.bitcast(value, vector(I32))
        odd = e.b.and_(e.b.lshr(bits, splat(e, I32(16))), splat(e, I32(1)))
        rounded = e.b.add(bits, e.b.add(odd, splat(e, I32(0x7FFF))))
        bits = e.b.select(e.b.fcmp_unordered("uno", value, value), splat(e, I32(0x7FC00000)), rounded)
        upper = e.b.trunc(e.b.lshr(bits, splat(e, I32(16))), vector(I16))
        store(e, upper, e.at(self.address, start, 2), mask)


@dataclass(frozen=True)
class Float16Row:
    """Float16."""

    address: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`."""
        return half_to_float(e, load(e, e.at(self.address, start, 2), I16, mask))

    def write(self, e: Emitter, start: Value, value: Value, mask: Value | None = None) -> None:
        """See `FloatRow`."""
        store(e, float_to_half(e, value), e.at(self.address, start, 2), mask)


@dataclass(frozen=True)
class E4M3Row:
    """FP8 whose codes are all numbers, times 2^`E4M3_EXPONENT`."""

    address: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`."""
        return e4m3_to_float(e, load(e, e.at(self.address, start), I8, mask))


@dataclass(frozen=True)
class CachedE4M3Row:
    """FP8 that may be NaN, times 2^`E4M3_EXPONENT`."""

    address: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`."""
        codes = load(e, e.at(self.address, start), I8, mask)
        is_nan = e.b.icmp_signed("==", e.b.and_(codes, splat(e, I8(0x7F))), splat(e, I8(0x7F)))
        return e.b.select(is_nan, splat(e, F32(float("nan"))), e4m3_to_float(e, codes))

    def write(self, e: Emitter, start: Value, value: Value, mask: Value | None = None) -> None:
        """Store the codes nearest to 16 numbers, themselves, from `start` on, or of those of a mask."""
        is_nan = e.b.fcmp_unordered("uno", value, value)
        scaled = e.b.fmul(to_e4m3(e, value), splat(e, F32(2.0**E4M3_EXPONENT)))
        bits = float_to_half(e, scaled)
        sign = e.b.and_(e.b.lshr(bits, splat(e, I16(8))), splat(e, I16(0x80)))
        codes = e.b.or_(sign, e.b.and_(e.b.lshr(bits, splat(e, I16(7))), splat(e, I16(0x7F))))
        codes = e.b.trunc(e.b.select(is_nan, splat(e, I16(0x7F)), codes), vector(I8))
        store(e, codes, e.at(self.address, start), mask)


@dataclass(frozen=True)
class NVFP4Row:
    """NVFP4 without its scale of the tensor, times 2^(`E2M1_EXPONENT` + `E4M3_EXPONENT`)."""

    address: Value
    scales: Value

    def read(self, e: Emitter, start: Value, mask: Value | None = None) -> Value:
        """See `Row`; rows hold whole blocks, so there is no mask."""
        packed = e.load(e.at(self.address, e.b.lshr(start, e.i64(1))), vector(I8, WIDTH // 2))
        low, high = e.b.and_(packed, splat(e, I8(15), 8)), e.b.lshr(packed, splat(e, I8(4), 8))
        codes = e.b.zext(picked(e, low, [i // 2 + i % 2 * 8 for i in range(WIDTH)], high), vector(I16))
        magnitude = e.b.shl(e.b.and_(codes, splat(e, I16(7))), splat(e, I16(9)))
        sign = e.b.shl(e.b.and_(codes, splat(e, I16(8))), splat(e, I16(12)))
        values = half_to_float(e, e.b.or_(magnitude, sign))
        code = e.load(e.at(self.scales, e.b.lshr(start, e.i64(4))), vector(I8, 1))
        scale = e4m3_to_float(e, picked(e, code, [0] * 8))
        return e.b.fmul(values, picked(e, scale, [0] * WIDTH))


def e4m3_to_float(e: Emitter, codes: Value) -> Value:
    """Codes of e4m3 that are not NaN to float32, times 2^`E4M3_EXPONENT`, exactly."""
    count = codes.type.count
    bits = e.b.shl(e.b.sext(codes, vector(I16, count)), splat(e, I16(7), count))
    # The sign has moved into the uppermost bit of the exponent as well.
    return half_to_float(e, e.b.and_(bits, splat(e, I16(~(1 << 14)), count)))


def to_e4m3(e: Emitter, x: Value) -> Value:
    """The nearest values of e4m3, in float32; what is beyond 448 becomes 448, NaN stays NaN."""
    return _rounded(e, clipped(e, x, E4M3_MAX), mantissa_bits=3, least_exponent=-6)


def to_e2m1(e: Emitter, x: Value) -> Value:
    """The nearest values of e2m1, in float32; what is beyond 6 becomes 6, NaN stays NaN."""
    return _rounded(e, clipped(e, x, E2M1_MAX), mantissa_bits=1, least_exponent=0)


def _rounded(e: Emitter, x: Value, *, mantissa_bits: int, least_exponent: int) -> Value:
    """To a narrow float in its range, ties to even; below 2^`least_exponent` its values are as far apart as above."""
    dropped = 23 - mantissa_bits
    bits = e.b.bitcast(x, vector(I32))
    odd = e.b.and_(e.b.lshr(bits, splat(e, I32(dropped))), splat(e, I32(1)))
    carried = e.b.add(bits, e.b.add(odd, splat(e, I32((1 << dropped - 1) - 1))))
    normal = e.b.bitcast(e.b.and_(carried, splat(e, I32(-1 << dropped))), x.type)
    # What is added to it has this distance between its own values.
    grid = splat(e, F32(1.5 * 2.0 ** (dropped + least_exponent)))
    subnormal = copysign(e, e.b.fsub(e.b.fadd(x, grid), grid), x)
    is_subnormal = e.b.fcmp_ordered("<", fabs(e, x), splat(e, F32(2.0**least_exponent)))
    near = e.b.select(is_subnormal, subnormal, normal)
    return e.b.select(e.b.fcmp_unordered("uno", x, x), x, near)


FLOATS: dict[torch.dtype, type[FloatRow | BFloat16Row | Float16Row]] = {
    torch.float32: FloatRow,
    torch.bfloat16: BFloat16Row,
    torch.float16: Float16Row,
}
"""Types that kernels read and write."""
STORED: dict[torch.dtype, type[FloatRow | BFloat16Row | Float16Row | CachedE4M3Row]] = {
    **FLOATS,
    torch.float8_e4m3fn: CachedE4M3Row,
}
"""The same and FP8, as caches hold them."""
