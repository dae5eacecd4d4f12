"""Vectors of numbers in kernels: 16 at a time, held in as many registers as the processor needs for them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir

from dflash_trt.ops.cpu.kernel import F16, F32, I8, I16, I32, I64, Emitter, Value

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
    return _folded(e, x, lambda a, b: e.call(f"llvm.maximum.v{a.type.count}f32", a, b))


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
    kind = {I16: "i16", F32: "f32"}[value.type.element]
    e.call(f"llvm.masked.store.v16{kind}.p0", value, address, I32(1), mask, returns=ir.VoidType())


def half_to_float(e: Emitter, bits: Value) -> Value:
    """Bits of float16 to float32, exactly."""
    count = bits.type.count
    return e.b.fpext(e.b.bitcast(bits, vector(F16, count)), vector(F32, count))
