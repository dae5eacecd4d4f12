"""FP8 against what ModelOpt's exporter writes, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, to_quantized_weight
from modelopt.torch.quantization.tensor_quant import fp8_eager
from modelopt.torch.quantization.utils import reduce_amax

from dflash_trt.errors import UserError
from dflash_trt.quantization.fp8 import decode_e4m3, dequantize_fp8, fake_quantize_fp8, fp8_scale, quantize_fp8
from tests.quantization.values import weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(weights(8, DTYPES))
def test_bytes_are_modelopts(weight: torch.Tensor) -> None:
    ours = quantize_fp8(weight, "w")
    assert not ours.weight.float().isnan().any()
    scale = reduce_amax(weight).float() / 448
    if scale == 0:
        assert ours.weight_scale == 1 and not ours.weight.float().any()
        return
    assert torch.equal(ours.weight_scale, scale)
    theirs = to_quantized_weight(weight, scale, QUANTIZATION_FP8)
    # A scale of few bits leaves quotients far above 448, which older torch casts to NaN.
    kept = ~theirs.float().isnan()
    assert torch.equal(ours.weight.view(torch.uint8)[kept], theirs.view(torch.uint8)[kept])
    assert bool((ours.weight.float().abs()[~kept] == 448).all())


@given(weights(8, DTYPES))
def test_decoding(weight: torch.Tensor) -> None:
    ours = quantize_fp8(weight, "w")
    assert torch.equal(dequantize_fp8(ours), ours.weight.float() * ours.weight_scale)
    assert dequantize_fp8(ours, torch.bfloat16).dtype == torch.bfloat16


def test_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    assert torch.equal(decode_e4m3(codes).view(torch.int32), codes.float().view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype: torch.dtype) -> None:
    """ModelOpt writes a scale of 0 and weights of NaN for a tensor of zeros."""
    ours = quantize_fp8(torch.zeros(2, 3, dtype=dtype), "w")
    assert ours.weight_scale == 1 and not ours.weight.float().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_refuses_what_is_not_finite(value: float) -> None:
    weight = torch.tensor([[1.0, value], [value, 2.0]])
    with pytest.raises(UserError, match="tensor w: 2 of its 4 values are infinite or not a number"):
        quantize_fp8(weight, "w")


@given(weights(8, (torch.float32, torch.bfloat16)))
def test_fake_quantization_is_quantization(x: torch.Tensor) -> None:
    scale = fp8_scale(x.abs().max())
    fake = fake_quantize_fp8(x, scale)
    assert fake.shape == x.shape and fake.dtype == x.dtype
    assert torch.equal(fake, dequantize_fp8(quantize_fp8(x.float(), "x"), x.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantization_is_close_to_modelopts(dtype: torch.dtype) -> None:
    """Which multiplies by 448 / amax instead of dividing by amax / 448: an ulp, which may move a tie."""
    x = torch.randn(64, 64).to(dtype)
    amax = x.abs().max().float() / 2
    ours, theirs = fake_quantize_fp8(x, amax / 448), fp8_eager(x, amax)
    assert (~torch.isclose(ours.float(), theirs.float(), rtol=1e-6)).float().mean() < 0.01
    assert torch.allclose(ours.float(), theirs.float(), rtol=2**-3, atol=float(amax / 448) * 2**-9)
    assert ours.abs().max() == amax.to(dtype)
