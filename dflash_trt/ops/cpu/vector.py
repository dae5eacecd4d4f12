"""Vectors of numbers in kernels: 16 at a time, held in as many registers as the processor needs for them."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce

import llvmlite.binding as llvm
from llvmlite import ir

from dflash_trt.ops.cpu.kernel import F16, F32, I1, I8, I16, I32, I64, Emitter, Value

WIDTH = 16
"""Numbers that kernels load, decode and store at once; a block of NVFP4."""


@cache
def lanes() -> int:
    """Float32 numbers in a register."""
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx512f") else 8 if features.get("avx2") else 4


@cache
def registers() -> int:
    """Vector registers."""
    features = llvm.get_host_cpu_features()
    return 16 if features.get("avx2") and not features.get("avx512f") else 32


@cache
def supported() -> bool:
    """Whether the processor multiplies and adds in one step and converts float16, as those since about 2013 do."""
    features = llvm.get_host_cpu_features()
    return platform.machine() in ("aarch64", "arm64") or all(features.get(each) for each in ("avx2", "fma", "f16c"))


def vector(type_: Value, count: int = WIDTH) -> Value:
    """The type of `count` of a type."""
    return ir.VectorType(type_, count)


def splat(e: Emitter, value: Value, count: int = WIDTH) -> Value:
    """`count` times a value."""
    type_ = vector(value.type, count)
    if isinstance(value, ir.Constant):
        return ir.Constant(type_, [value.constant] * count)
    first = e.b.insert_element(ir.Constant(type_, ir.Undefined), value, I32(0))
    return e.b.shuffle_vector(first, ir.Constant(type_, ir.Undefined), ir.Constant(vector(I32, count), [0] * count))


def picked(e: Emitter, a: Value, places: Sequence[int], b: Value | None = None) -> Value:
    """Elements of a, and after them those of b, at `places`."""
    other = ir.Constant(a.type, ir.Undefined) if b is None else b
    return e.b.shuffle_vector(a, other, ir.Constant(vector(I32, len(places)), list(places)))


def slices(e: Emitter, x: Value) -> list[Value]:
    """A vector of `WIDTH` in registers of `lanes()`."""
    size = lanes()
    return [picked(e, x, range(start, start + size)) for start in range(0, WIDTH, size)]


def fma(e: Emitter, a: Value, b: Value, c: Value) -> Value:
    """a * b + c, rounded once."""
    return e.call(f"llvm.fma.v{a.type.count}f32", a, b, c)


def total(e: Emitter, x: Value) -> Value:
    """The sum of a vector: its halves are added until one number is left."""
    return _folded(e, x, e.b.fadd)


def maximum(e: Emitter, x: Value) -> Value:
    """The largest of a vector, or NaN where it holds one."""
    return _folded(e, x, lambda a, b: larger_of(e, (a, b)))


def larger_of(e: Emitter, vectors: Sequence[Value]) -> Value:
    """The larger of some vectors, place by place, or NaN where one of them is."""
    return reduce(lambda a, b: e.call(f"llvm.maximum.v{a.type.count}f32", a, b), vectors)


def fabs(e: Emitter, x: Value) -> Value:
    """|x|."""
    return e.call(f"llvm.fabs.v{x.type.count}f32", x)


def copysign(e: Emitter, x: Value, sign: Value) -> Value:
    """|x| with the signs of another vector."""
    return e.call(f"llvm.copysign.v{x.type.count}f32", x, sign)


def smaller(e: Emitter, x: Value, most: float) -> Value:
    """min(x, most), NaN where x is."""
    limit = splat(e, F32(most), x.type.count)
    return e.b.select(e.b.fcmp_ordered(">", x, limit), limit, x)


def larger(e: Emitter, x: Value, least: float) -> Value:
    """max(x, least), NaN where x is."""
    limit = splat(e, F32(least), x.type.count)
    return e.b.select(e.b.fcmp_ordered("<", x, limit), limit, x)


def clipped(e: Emitter, x: Value, limit: float) -> Value:
    """x within -limit and limit, NaN where x is."""
    return larger(e, smaller(e, x, limit), -limit)


def chunks(e: Emitter, size: int) -> Iterator[tuple[Value, Value | None]]:
    """Starts of `WIDTH` of `size` numbers, and which of them there are where not all."""
    whole = size // WIDTH * WIDTH
    if whole:
        with e.loop(e.i64(0), e.i64(whole), e.i64(WIDTH)) as start:
            yield start, None
    if size > whole:
        yield e.i64(whole), ir.Constant(vector(I1), [int(place < size - whole) for place in range(WIDTH)])


_ELEMENTS = 1 << 12
"""Numbers that a thread takes at once."""


def elementwise(e: Emitter, count: Value, write: Callable[[Value, Value | None], None]) -> None:
    """`write` for the start of every `WIDTH` of `count` numbers, and which of them there are where not all."""
    with e.units(e.i64(_ELEMENTS), count) as (first, end):
        left = e.b.and_(e.b.sub(end, first), e.i64(WIDTH - 1))
        whole = e.b.sub(end, left)
        with e.loop(first, whole, e.i64(WIDTH)) as start:
            write(start, None)
        with e.b.if_then(e.b.icmp_signed(">", left, e.i64(0))):
            write(whole, tail_mask(e, left))


def _folded(e: Emitter, x: Value, join: object) -> Value:
    while x.type.count > 1:
        half = x.type.count // 2
        x = join(picked(e, x, range(half)), picked(e, x, range(half, 2 * half)))  # type: ignore[operator]
    return e.b.extract_element(x, I32(0))


def tail_mask(e: Emitter, count: Value) -> Value:
    """Which of `WIDTH` elements are among the first `count`, an i64 that may be more."""
    numbers = ir.Constant(vector(I64), list(range(WIDTH)))
    return e.b.icmp_signed("<", numbers, splat(e, count))


def load(e: Emitter, address: Value, type_: Value, mask: Value | None = None) -> Value:
    """`WIDTH` of a type; where there is a mask, zeros stand for what it leaves out, which is not read."""
    if mask is None:
        return e.load(address, vector(type_))
    zeros = ir.Constant(vector(type_), [0] * WIDTH if isinstance(type_, ir.IntType) else [0.0] * WIDTH)
    kind = {I8: "i8", I16: "i16", F32: "f32"}[type_]
    return e.call(f"llvm.masked.load.v16{kind}.p0", address, I32(1), mask, zeros, returns=zeros.type)


def store(e: Emitter, value: Value, address: Value, mask: Value | None = None) -> None:
    """Write `WIDTH` numbers, or those that a mask has."""
    if mask is None:
        e.store(value, address)
        return
    kind = {I8: "i8", I16: "i16", F32: "f32"}[value.type.element]
    e.call(f"llvm.masked.store.v16{kind}.p0", value, address, I32(1), mask, returns=ir.VoidType())


def half_to_float(e: Emitter, bits: Value) -> Value:
    """Bits of float16 to float32, exactly."""
    count = bits.type.count
    return e.b.fpext(e.b.bitcast(bits, vector(F16, count)), vector(F32, count))


def float_to_half(e: Emitter, value: Value) -> Value:
    """Bits of the nearest float16."""
    return e.b.bitcast(e.b.fptrunc(value, vector(F16, value.type.count)), vector(I16, value.type.count))


_ROUNDING = 1.5 * 2.0**23
"""What is added to it is rounded to an integer, which its lower bits then hold."""
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LEAST, _GREATEST = -87.0, 89.0
"""Where exp underflows and overflows, nearly."""
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""(e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, highest power first: the polynomial of Cephes' expf."""


def exp(e: Emitter, x: Value) -> Value:
    """e^x to about a unit in the last place; zero below -87."""

    def constant(value: float) -> Value:
        return splat(e, F32(value), x.type.count)

    is_zero = e.b.fcmp_ordered("<", x, constant(_LEAST))
    x = e.b.select(is_zero, constant(_LEAST), x)
    x = e.b.select(e.b.fcmp_ordered(">", x, constant(_GREATEST)), constant(_GREATEST), x)
    rounded = fma(e, x, constant(math.log2(math.e)), constant(_ROUNDING))
    power = e.b.fsub(rounded, constant(_ROUNDING))
    r = fma(e, power, constant(-_LN2_HIGH), x)
    r = fma(e, power, constant(-_LN2_LOW), r)
    value = constant(_EXP[0])
    for coefficient in _EXP[1:]:
        value = fma(e, value, r, constant(coefficient))
    value = fma(e, value, e.b.fmul(r, r), e.b.fadd(r, constant(1.0)))
    ints = vector(I32, x.type.count)
    exponent = e.b.add(e.b.bitcast(rounded, ints), splat(e, I32(127), x.type.count))
    scale = e.b.bitcast(e.b.shl(exponent, splat(e, I32(23), x.type.count)), x.type)
    return e.b.select(is_zero, constant(0.0), e.b.fmul(value, scale))
