"""FP8 against what ModelOpt's exporter writes, byte for byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modelopt.torch.export.quant_utils import QUANTIZATION_FP8, to_quantized_weight
from modelopt.torch.quantization.tensor_quant import fp8_eager
from modelopt.torch.quantization.utils import reduce_amax

from dflash_trt.errors import UserError
from dflash_trt.quantization import fp8
from dflash_trt.quantization.fp8 import (
    FP8Tensor,
    decode_e4m3,
    dequantize_fp8,
    encode_fp8,
    fake_quantize_fp8,
    fp8_scale,
    quantize_fp8,
)
from tests.quantization.values import weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
NUMBERS = ALL_CODES[~ALL_CODES.float().isnan()]


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


def many(codes: torch.Tensor) -> torch.Tensor:
    """The codes over and over, more than are decoded at once."""
    return codes.view(torch.uint8).repeat(3 * fp8._MANY // len(codes) + 1).view(torch.float8_e4m3fn)


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """NaN for NaN and the same bits for all else."""
    assert ours.dtype == theirs.dtype and torch.equal(ours.isnan(), theirs.isnan())
    ours, theirs = (values.contiguous().nan_to_num(0.0).flatten().view(torch.uint8) for values in (ours, theirs))
    assert torch.equal(ours, theirs)


def test_decodes_every_code() -> None:
    codes = ALL_CODES.view(16, 16)
    assert torch.equal(decode_e4m3(codes).view(torch.int32), codes.float().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("codes", [NUMBERS, ALL_CODES, many(NUMBERS), many(ALL_CODES)], ids=len)
@given(scale=st.floats(0, 2.0**119, width=32) | st.floats(0, 1, width=32))
@settings(max_examples=20)
def test_values_are_torchs(scale: float, codes: torch.Tensor, dtype: torch.dtype) -> None:
    """To the bit, whatever is subnormal, infinite or not a number."""
    weight_scale = torch.tensor(scale)
    assert_same_bits(dequantize_fp8(FP8Tensor(codes, weight_scale), dtype), (codes.float() * weight_scale).to(dtype))


def test_nan_among_many_numbers() -> None:
    for code in (0x7F, 0xFF):
        weight = many(NUMBERS).clone()
        weight.view(torch.uint8)[-1] = code
        values = dequantize_fp8(FP8Tensor(weight, torch.tensor(0.5)))
        assert values[-1].isnan() and not values[:-1].isnan().any()


def test_many_with_subnormals_flushed() -> None:
    """Codes of subnormals are no subnormals in float32."""
    codes, scale = many(NUMBERS), torch.tensor(0.37)
    expected = codes.float() * scale
    flushed = torch.set_flush_denormal(True)
    try:
        values = dequantize_fp8(FP8Tensor(codes, scale))
    finally:
        torch.set_flush_denormal(False)
    assert flushed and torch.equal(values, expected)


def test_many_of_any_stride() -> None:
    codes, scale = many(NUMBERS)[: 3 * 4 * 15_000].view(3, 15_000, 4).transpose(0, 2), torch.tensor(0.5)
    expected = codes.float() * scale
    assert torch.equal(dequantize_fp8(FP8Tensor(codes, scale)), expected)
    assert torch.equal(dequantize_fp8(FP8Tensor(codes[:, ::2], scale)), expected[:, ::2])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    codes = torch.zeros(shape).to(torch.float8_e4m3fn)
    assert decode_e4m3(codes).shape == dequantize_fp8(FP8Tensor(codes, torch.tensor(1.0))).shape == shape


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


def test_the_last_bits_of_float64_decide_nothing() -> None:
    """Halfway between two codes, or a bit beside."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    x = (values[1:] + values[:-1]) / 2 * 0.375
    inf = torch.tensor(torch.inf, dtype=torch.float64)
    codes = [encode_fp8(each, torch.tensor(0.375)).float() for each in (x, x.nextafter(inf), x.nextafter(-inf))]
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])
