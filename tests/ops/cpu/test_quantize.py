"""Activations rounded in kernels, against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.ops.cpu.quantize import rounded_to_fp8, rounded_to_nvfp4
from dflash_trt.quantization.fp8 import encode_fp8
from dflash_trt.quantization.nvfp4 import fake_quantize_nvfp4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def every_float16() -> torch.Tensor:
    """Subnormals, ties between codes of either format, infinities and NaN among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def beside_ties(values: torch.Tensor) -> torch.Tensor:
    """Float32 numbers, and their neighbours on either side."""
    infinity = torch.tensor(float("inf"))
    return torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 0.013, 1e30, 1e-42])
def test_fp8(dtype: torch.dtype, scale: float) -> None:
    x = beside_ties(every_float16().float())[:-5].to(dtype)
    torch.testing.assert_close(
        rounded_to_fp8(x, torch.tensor(scale)), encode_fp8(x, torch.tensor(scale)).float(), **EXACT
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-8, 0.013, 1e30, 1e-42])
def test_nvfp4(dtype: torch.dtype, scale: float) -> None:
    x = beside_ties(every_float16().float())
    x = x[torch.randperm(len(x))].view(3, -1, 64).to(dtype)
    torch.testing.assert_close(
        rounded_to_nvfp4(x, torch.tensor(scale)), fake_quantize_nvfp4(x.float(), torch.tensor(scale)), **EXACT
    )


@given(rows=st.integers(1, 40), blocks=st.integers(1, 40), scale=st.floats(2.0**-20, 8, width=32))
@settings(max_examples=50)
def test_any_shape(rows: int, blocks: int, scale: float) -> None:
    x, input_scale = torch.randn(rows, 16 * blocks), torch.tensor(scale)
    assert torch.equal(rounded_to_nvfp4(x, input_scale), fake_quantize_nvfp4(x, input_scale))
    x = x[:, : 16 * blocks - rows % 16]
    assert torch.equal(rounded_to_fp8(x, input_scale), encode_fp8(x, input_scale).float())
