"""Gumbel noise on CPUs: what `plugins.noise.gumbel` gives, whose Philox takes torch longer than a pass of a model."""

from __future__ import annotations

from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from dflash_trt.ops.cpu.kernel import F32, F64, I32, I64, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import WIDTH, picked, splat, vector
from dflash_trt.plugins.noise import MULTIPLIERS, ROUNDS, WEYL, noise_of

_ROWS, _SEEDS, _POSITIONS, _GROUP, _GROUPS, _OUT = range(2, 8)
_SMALL = 1 << 13
"""Numbers that one thread is done with before another one is awake."""
_FLOATS = {torch.float32: F32, torch.float64: F64}


def gumbel(seeds: Tensor, positions: Tensor, tokens: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Standard Gumbel noise [..., tokens], to the bit that of `plugins.noise.gumbel`; float32 or float64."""
    groups = -(-((first + tokens + 3) // 4 - first // 4) // WIDTH) * WIDTH
    seeds, positions = seeds.contiguous(), positions.contiguous()
    uniform = torch.empty(*seeds.shape, 4 * groups, dtype=dtype)
    threads = 1 if uniform.numel() < _SMALL else torch.get_num_threads()
    _kernel(dtype)(
        threads, seeds.numel(), seeds.data_ptr(), positions.data_ptr(), first // 4, groups, uniform.data_ptr()
    )
    noise: Tensor = noise_of(uniform)
    return noise[..., first % 4 : first % 4 + tokens]


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return compiled(lambda e: _write(e, dtype), f"uniform_{dtype}".replace("torch.", ""))


def _write(e: Emitter, dtype: torch.dtype) -> None:
    """A unit is `WIDTH` groups of four tokens of a row."""
    groups = e.argument(_GROUPS)
    per_row = e.b.sdiv(groups, e.i64(WIDTH))
    with e.units(e.i64(1), e.b.mul(per_row, e.argument(_ROWS))) as (unit, _):
        row, start = e.b.sdiv(unit, per_row), e.b.mul(e.b.srem(unit, per_row), e.i64(WIDTH))
        seed, position = (e.load(e.at(e.pointer(index), row, 8), I64) for index in (_SEEDS, _POSITIONS))
        group = e.b.trunc(e.b.add(e.argument(_GROUP), start), I32)
        places = e.b.add(splat(e, group), ir.Constant(vector(I32), list(range(WIDTH))))
        zero = splat(e, I32(0))
        key = (splat(e, e.b.trunc(seed, I32)), splat(e, e.b.trunc(e.b.lshr(seed, I64(32)), I32)))
        words = _philox(e, [places, splat(e, e.b.trunc(position, I32)), zero, zero], key)
        out = e.at(e.pointer(_OUT), e.b.add(e.b.mul(row, groups), start), 4 * dtype.itemsize)
        for index, four in enumerate(_in_turn(e, words)):
            e.store(_uniform(e, four, dtype), e.at(out, e.i64(index * WIDTH), dtype.itemsize))


def _philox(e: Emitter, counter: list[Value], key: tuple[Value, Value]) -> list[Value]:
    """Four words for each of `WIDTH` counters: Philox-4x32-10, see `plugins.noise`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = (_product(e, c, by) for c, by in zip((c0, c2), MULTIPLIERS, strict=True))
        c0, c1, c2, c3 = e.b.xor(e.b.xor(high1, c1), k0), low1, e.b.xor(e.b.xor(high0, c3), k1), low0
        k0, k1 = (e.b.add(k, splat(e, I32(step))) for k, step in zip((k0, k1), WEYL, strict=True))
    return [c0, c1, c2, c3]


def _product(e: Emitter, a: Value, by: int) -> tuple[Value, Value]:
    """The upper and the lower half of a product of words."""
    product = e.b.mul(e.b.zext(a, vector(I64)), splat(e, I64(by)))
    upper = e.b.lshr(product, splat(e, I64(32)))
    return e.b.trunc(upper, vector(I32)), e.b.trunc(product, vector(I32))


def _in_turn(e: Emitter, words: list[Value]) -> list[Value]:
    """The first word of each counter, the second of each, ... to the four words of the first counter, of the next."""
    pairs = [
        picked(e, a, [place // 2 + place % 2 * WIDTH for place in range(2 * WIDTH)], b)
        for a, b in (words[:2], words[2:])
    ]
    order = [place // 4 * 2 + place % 2 + place % 4 // 2 * 2 * WIDTH for place in range(4 * WIDTH)]
    return [picked(e, pairs[0], order[start : start + WIDTH], pairs[1]) for start in range(0, 4 * WIDTH, WIDTH)]


def _uniform(e: Emitter, words: Value, dtype: torch.dtype) -> Value:
    """(words + 1/2) / 2^32, below 1."""
    wide = e.b.fadd(e.b.uitofp(words, vector(F64)), splat(e, F64(0.5)))
    value = e.b.fmul(wide, splat(e, F64(2.0**-32)))
    if dtype == torch.float32:
        value = e.b.fptrunc(value, vector(F32))
    most = splat(e, _FLOATS[dtype](1.0 - torch.finfo(dtype).eps / 2))
    return e.b.select(e.b.fcmp_ordered("<", value, most), value, most)
