"""SwiGLU on CPUs against torch in float64, and the exponential in it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.ops.cpu.activation import swiglu

UNITS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", UNITS)
def test_swiglu_of_every_magnitude(dtype: torch.dtype) -> None:
    gate = torch.linspace(-85, 120, 30001).to(dtype)
    up = torch.randn(30001).to(dtype)
    expected = F.silu(gate.double()) * up.double()
    error = (swiglu(gate, up).double() - expected).abs()
    assert bool((error <= 4 * UNITS[dtype] * expected.abs() + torch.finfo(dtype).tiny).all())


def test_swiglu_of_what_has_no_exponential() -> None:
    gate = torch.tensor([float("nan"), float("inf"), -200.0, -1e30, 0.0])
    result = swiglu(gate, torch.ones(5))
    assert bool(result[0].isnan()) and result[1] == float("inf") and result[2:].abs().max() < 1e-35


@given(rows=st.integers(1, 9), size=st.integers(1, 700), threads=st.sampled_from([1, 2, 3]))
def test_a_number_is_the_same_wherever_it_lies(rows: int, size: int, threads: int) -> None:
    gate, up = torch.randn(rows, size), torch.randn(rows, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        together = swiglu(gate, up)
    assert torch.equal(together, torch.cat([swiglu(*row) for row in zip(gate.split(1), up.split(1), strict=True)]))
