"""The counter-based Gumbel noise of `noise.py` inside a kernel, in float32.

It has the same bits and uniform numbers; a logarithm may differ in the last place. Nothing is computed in float64, of
which data-centre GPUs since B300 have next to none.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits_by_fours(seed, position, first, BLOCK: tl.constexpr):
    group = first // 4 + tl.arange(0, BLOCK // 4)
    zero = group * 0
    word0, word1, word2, word3 = tl.philox(seed, group, position + zero, zero, zero)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def _bits_one_by_one(seed, position, first, BLOCK: tl.constexpr):
    token = first + tl.arange(0, BLOCK)
    zero = token * 0
    word0, word1, word2, word3 = tl.philox(seed, token // 4, position + zero, zero, zero)
    even = token % 2 == 0
    return tl.where(token % 4 < 2, tl.where(even, word0, word1), tl.where(even, word2, word3))


@triton.jit
def philox_bits(seed, position, first, BLOCK: tl.constexpr):
    """The 32-bit words of tokens `first`..`first` + BLOCK - 1: a counter gives four, one for each of four tokens."""
    # A rank's part of the vocabulary nearly always begins at a multiple of four: that is four times less work.
    if first % 4 == 0:
        bits = _bits_by_fours(seed, position, first, BLOCK)
    else:
        bits = _bits_one_by_one(seed, position, first, BLOCK)
    return bits


@triton.jit
def uniform(bits):
    """(bits + 1/2) / 2^32, rounded once to float32, and at most the largest below 1."""
    # Of small words twice that and one is exact. Large ones have more bits than float32 keeps, so that below the last
    # of these it only matters that something is there.
    small = (bits * 2 + 1).to(tl.float32) * 2.0**-33
    large = (bits | 1).to(tl.float32) * 2.0**-32
    return tl.minimum(tl.where(bits < 2147483648, small, large), 1.0 - 2.0**-24)


@triton.jit
def gumbel(seed, position, first, BLOCK: tl.constexpr):
    """Standard Gumbel noise of tokens `first`.. `first` + BLOCK - 1."""
    u = uniform(philox_bits(seed, position, first, BLOCK))
    rest = 1.0 - u
    # log(1 - u) of what 1 - u was rounded to, times how much that was off: W. Kahan's log1p.
    tail = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(tail)
