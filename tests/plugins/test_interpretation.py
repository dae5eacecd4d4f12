"""The interpreter converts and multiplies as torch does, whatever the type."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernel import Kernel, pointer
from tests.closeness import last_places

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@triton.jit
def _cast(x, y, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(y + index, tl.load(x + index).to(y.dtype.element_ty))


@triton.jit
def _product(a, b, c, SIZE: tl.constexpr):
    square = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square), tl.load(c + square)))


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_floats_are_converted_as_torch_converts_them(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat((torch.randn(1021) * 10, torch.tensor([torch.nan, 0.0, -0.0]))).to(source)
    y = torch.empty(1024, dtype=target)
    Kernel(_cast, {"x": pointer(source), "y": pointer(target)}, {"BLOCK": 1024}, lambda sizes: (1, 1, 1)).launch(x, y)
    torch.testing.assert_close(y.float(), x.to(target).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES[:3])
def test_products_are_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32).to(dtype) for _ in range(2))
    c = torch.randn(32, 32)
    expected = a.double() @ b.double() + c
    parameters = {"a": pointer(dtype), "b": pointer(dtype), "c": "*fp32"}
    Kernel(_product, parameters, {"SIZE": 32}, lambda sizes: (1, 1, 1)).launch(a, b, c)
    torch.testing.assert_close(c.double(), expected, **last_places(96))
