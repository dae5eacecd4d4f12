"""NVFP4 against ModelOpt's own tensors, byte for byte."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from dflash_trt.errors import UserError
from dflash_trt.quantization import nvfp4
from dflash_trt.quantization.amax import tensor_amax
from dflash_trt.quantization.nvfp4 import (
    NVFP4Tensor,
    dequantize_nvfp4,
    fake_quantize_nvfp4,
    nvfp4_scale_2,
    quantize_nvfp4,
)
from tests.quantization.values import weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def modelopt_quantize(weight: torch.Tensor, scale_2: torch.Tensor | None = None) -> NVFP4Tensor:
    packed, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=scale_2)
    return NVFP4Tensor(packed._quantized_data, scale, scale_2)


def assert_same_bytes(ours: NVFP4Tensor, theirs: NVFP4Tensor) -> None:
    for field, a, b in zip(NVFP4Tensor._fields, ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, field
        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), field


@settings(max_examples=300)
@given(weights(16, DTYPES))
def test_bytes_are_modelopts(weight: torch.Tensor) -> None:
    ours = quantize_nvfp4(weight, "w")
    if weight.abs().max().float() / 2688 == 0:
        assert not dequantize_nvfp4(ours).any() and ours.weight_scale_2 == 1
        return
    theirs = modelopt_quantize(weight)
    # Where the product of the scales underflows, both mean zeros, by different codes.
    lost = (theirs.weight_scale.float() * theirs.weight_scale_2 == 0).repeat_interleave(16, dim=-1)
    if lost.any():
        assert not dequantize_nvfp4(ours)[lost].any()
        kept = ~lost[:, ::2]
        theirs = theirs._replace(weight=torch.where(kept, theirs.weight, ours.weight))
    assert_same_bytes(ours, theirs)


@given(weights(16, DTYPES))
def test_values_are_modelopts(weight: torch.Tensor) -> None:
    ours = quantize_nvfp4(weight, "w")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = NVFP4QTensor(weight.shape, dtype, ours.weight).dequantize(
            scale=ours.weight_scale, double_scale=ours.weight_scale_2, block_sizes={-1: 16}
        )
        assert torch.equal(dequantize_nvfp4(ours, dtype), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_keeps_what_is_nvfp4_already(dtype: torch.dtype) -> None:
    weight = torch.randn(16, 256).to(dtype)
    ours = quantize_nvfp4(weight, "w")
    again = quantize_nvfp4(dequantize_nvfp4(ours), "w", ours.weight_scale_2)
    assert torch.equal(again.weight_scale.float(), ours.weight_scale.float())
    assert torch.equal(dequantize_nvfp4(again), dequantize_nvfp4(ours))


def test_a_shared_scale() -> None:
    q, k = torch.randn(8, 64), torch.randn(4, 64) * 0.01
    shared = nvfp4_scale_2(torch.maximum(tensor_amax(q, "q"), tensor_amax(k, "k")))
    for weight in (q, k):
        ours = quantize_nvfp4(weight, "w", shared)
        assert ours.weight_scale_2 is shared
        assert_same_bytes(ours, modelopt_quantize(weight, shared))


def test_a_scale_that_is_too_small_saturates_as_modelopts() -> None:
    weight, scale_2 = torch.randn(4, 32), torch.tensor(1e-6)
    ours = quantize_nvfp4(weight, "w", scale_2)
    assert_same_bytes(ours, modelopt_quantize(weight, scale_2))
    assert torch.equal(ours.weight_scale.float(), torch.full((4, 2), 448.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype: torch.dtype) -> None:
    """ModelOpt writes scales of NaN and codes of 6 for a tensor of zeros."""
    ours = quantize_nvfp4(torch.zeros(2, 32, dtype=dtype), "w")
    assert not ours.weight.any()
    assert torch.equal(ours.weight_scale.float(), torch.ones(2, 2))
    assert ours.weight_scale_2 == 1 and not dequantize_nvfp4(ours).any()


def test_zeros_stay_zeros_where_a_scale_underflows() -> None:
    """ModelOpt casts 0 / 0 there, to codes of 6; times a scale of zero they mean the same."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 4e-42, 1e-45
    ours, theirs = quantize_nvfp4(weight, "w"), modelopt_quantize(weight)
    assert ours.weight[0, 9:].tolist() == [0] * 7 and theirs.weight[0, 9:].tolist() == [0x77] * 7
    assert not dequantize_nvfp4(ours)[0, 16:].any() and not dequantize_nvfp4(theirs)[0, 16:].any()


def test_a_block_of_zeros_has_a_scale_of_one() -> None:
    weight = torch.randn(2, 32)
    weight[1, 16:] = 0
    ours = quantize_nvfp4(weight, "w")
    assert ours.weight_scale[1, 1].float() == 1
    assert_same_bytes(ours, modelopt_quantize(weight))


def test_parts_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 80).bfloat16()
    whole = quantize_nvfp4(weight, "w")
    monkeypatch.setitem(nvfp4._BLOCKS_AT_ONCE, "cpu", 4)
    assert_same_bytes(quantize_nvfp4(weight, "w"), whole)


def test_stacked_and_transposed_weights() -> None:
    experts = torch.randn(3, 64, 8).transpose(1, 2)
    shared = nvfp4_scale_2(tensor_amax(experts, "w"))
    stacked = quantize_nvfp4(experts, "w")
    assert stacked.weight.shape == (3, 8, 32) and stacked.weight_scale.shape == (3, 8, 4)
    for i, expert in enumerate(experts):
        alone = quantize_nvfp4(expert, "w", shared)
        assert_same_bytes(alone, NVFP4Tensor(stacked.weight[i], stacked.weight_scale[i], shared))
    assert dequantize_nvfp4(stacked).shape == experts.shape


def test_leaves_the_weight_alone() -> None:
    weight = torch.randn(4, 32)
    before = weight.clone()
    quantize_nvfp4(weight, "w")
    assert torch.equal(weight, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_refuses_what_is_not_finite(value: float, dtype: torch.dtype) -> None:
    weight = torch.randn(4, 32).to(dtype)
    weight[2, 5] = value
    with pytest.raises(UserError, match=r"tensor a\.b\.weight: 1 of its 128 values are infinite or not a number"):
        quantize_nvfp4(weight, "a.b.weight")


def test_refuses_a_size_that_does_not_divide() -> None:
    with pytest.raises(UserError, match=r"tensor a\.weight: its last dimension, 24 of \[4, 24\], .* multiple of 16"):
        quantize_nvfp4(torch.randn(4, 24), "a.weight")


@given(weights(16, (torch.float32, torch.bfloat16)))
def test_fake_quantization_is_quantization(x: torch.Tensor) -> None:
    """At the scale of its own amax an activation is quantized as a weight is, but that small scales round to zero."""
    scale = nvfp4_scale_2(x.abs().max())
    fake = fake_quantize_nvfp4(x, scale)
    assert fake.shape == x.shape and fake.dtype == x.dtype
    real = quantize_nvfp4(x, "x", scale)
    blocks = x.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    kept = (blocks / (6 * scale) >= 2**-9).repeat_interleave(16, dim=-1)
    assert torch.equal(fake[kept], dequantize_nvfp4(real, x.dtype)[kept])
    gone = (blocks / (6 * scale) <= 2**-10).repeat_interleave(16, dim=-1)
    assert not fake[gone].any()


def test_fake_quantization_saturates() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([1000.0, -1e30, 13.0, 1.0])
    scale = torch.tensor(0.01)
    assert torch.equal(fake_quantize_nvfp4(x, scale)[0, :4], torch.tensor([6.0, -6.0, 3.0, 0.0]) * (448 * scale))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_quantization_keeps_type_shape_and_nan(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 32, dtype=dtype)
    x[1, 2, 20] = float("nan")
    fake = fake_quantize_nvfp4(x, torch.tensor(0.001))
    assert fake.shape == x.shape and fake.dtype == dtype
    assert bool(fake[1, 2, 16:].isnan().all()) and not fake[1, 2, :16].isnan().any() and not fake[0].isnan().any()


def test_the_last_bits_of_float64_decide_nothing() -> None:
    """6 codes over a power of two, by a largest one of 6 and of others: halfway between two of e2m1, or a bit beside."""
    ratios = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2, dtype=torch.float64) / 64
    x = torch.stack([ratios, 1.0625 * ratios])  # the second one's scale is halfway between two of e4m3
    inf = torch.tensor(math.inf, dtype=torch.float64)
    codes = [fake_quantize_nvfp4(each, torch.tensor(1 / 64)) for each in (x, x.nextafter(inf), x.nextafter(-inf))]
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])
