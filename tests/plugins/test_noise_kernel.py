"""The noise inside kernels is that of the torch executor: its bits and uniform numbers exactly."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.plugins import noise
from dflash_trt.plugins.kernel import Kernel
from dflash_trt.plugins.noise_kernel import gumbel, philox_bits, uniform
from tests.closeness import last_places

BLOCK = 64


@triton.jit
def _noise(seeds, position, first, words, noises, BLOCK: tl.constexpr):
    index, seed = tl.arange(0, BLOCK), tl.load(seeds)
    tl.store(words + index, philox_bits(seed, position, first, BLOCK).to(tl.int64))
    tl.store(noises + index, gumbel(seed, position, first, BLOCK))


@triton.jit
def _uniform(words, numbers, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(numbers + index, uniform(tl.load(words + index).to(tl.uint32)))


def noise_of(seed: int, position: int, first: int) -> tuple[Tensor, Tensor]:
    parameters = {"seeds": "*i64", "position": "i32", "first": "i32", "words": "*i64", "noises": "*fp32"}
    kernel = Kernel(_noise, parameters, {"BLOCK": BLOCK}, lambda sizes: (1, 1, 1))
    words, noises = torch.empty(BLOCK, dtype=torch.int64), torch.empty(BLOCK)
    kernel.launch(torch.tensor([seed]), position, first, words, noises)
    return words, noises


def words_of(seed: int, position: int, first: int) -> Tensor:
    tokens = torch.arange(first, first + BLOCK)
    zero = torch.zeros_like(tokens)
    key = torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])
    words = noise.philox((tokens // 4, zero + position, zero, zero), key)
    return torch.stack(words).gather(0, (tokens % 4)[None])[0]


@settings(max_examples=40)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1 - BLOCK))
@example(2**63 - 1, 2**31 - 1, 2**31 - 1 - BLOCK)
@example(0, 0, 0)
def test_bits_are_those_of_torch(seed: int, position: int, first: int) -> None:
    words, noises = noise_of(seed, position, first)
    assert words.equal(words_of(seed, position, first))
    expected = noise.gumbel(torch.tensor([seed]), torch.tensor([position]), BLOCK, torch.float32, first)[0]
    torch.testing.assert_close(noises, expected, **last_places(32))


def edges() -> Tensor:
    """Words at which rounding to float32 goes one way or the other, and some thousands of others."""
    powers = torch.tensor([2**k for k in range(33)])
    halves = powers + powers // 2
    near = torch.cat([x + offset for x in (powers, halves, powers + powers // 2**24) for offset in range(-3, 4)])
    ties = 2**31 + torch.arange(0, 2048)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**32, (8000,), generator=generator)
    small = torch.randint(0, 2**26, (4000,), generator=generator)
    return torch.cat([near, ties, 2**32 - 1 - torch.arange(0, 2048), random, small]).clamp(0, 2**32 - 1)


def test_uniform_numbers_are_those_of_torch() -> None:
    words = edges()
    words = torch.nn.functional.pad(words, (0, -len(words) % 1024))
    numbers = torch.empty(len(words))
    kernel = Kernel(
        _uniform, {"words": "*i64", "numbers": "*fp32"}, {"BLOCK": 1024}, lambda sizes: (len(words) // 1024, 1, 1)
    )
    kernel.launch(words, numbers)
    expected = ((words.double() + 0.5) * 2.0**-32).float().clamp(max=1.0 - 2.0**-24)
    assert numbers.equal(expected)
    assert 0 < numbers.min() < 2.0**-32 and numbers.max() == 1.0 - 2.0**-24


@pytest.mark.parametrize("compute_capability", [80, 103])
def test_nothing_is_computed_in_float64(compute_capability: int) -> None:
    parameters = {"seeds": "*i64", "position": "i32", "first": "i32", "words": "*i64", "noises": "*fp32"}
    kernel = Kernel(_noise, parameters, {"BLOCK": 1024}, lambda sizes: (1, 1, 1))
    assert "f64" not in kernel.compile(compute_capability).ptx
