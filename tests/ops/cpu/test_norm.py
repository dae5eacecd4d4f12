"""RMS norm on CPUs against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.ops.cpu.norm import rms_norm

UNITS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""A unit in the last place, of one."""


@pytest.mark.parametrize("dtype", UNITS)
@given(rows=st.integers(1, 12), size=st.sampled_from([1, 8, 16, 40, 128, 576]))
def test_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = (30 * torch.randn(2, rows, size)).to(dtype), torch.randn(size).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5)
    error = (actual.double() - expected).abs()
    assert actual.dtype == dtype and bool((error <= 8 * UNITS[dtype] * expected.abs() + 1e-7).all())
    for row in range(rows):
        assert torch.equal(rms_norm(x[1:, row : row + 1], weight, 1e-5)[0, 0], actual[1, row])


def test_of_heads_that_lie_apart() -> None:
    heads, weight = torch.randn(2, 5, 3, 16).transpose(1, 2), torch.randn(16)
    assert torch.equal(rms_norm(heads, weight, 1e-6), rms_norm(heads.contiguous(), weight, 1e-6))


def test_squares_of_float16_do_not_overflow() -> None:
    x, half = torch.full((1, 64), 300.0, dtype=torch.float16), torch.full((64,), 0.5, dtype=torch.float16)
    assert torch.equal(rms_norm(x, half, 1e-6), half[None])
