"""MXFP4 against transformers' and ModelOpt's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor import MXFP4QTensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dflash_trt.errors import UserError
from dflash_trt.quantization.mxfp4 import (
    MXFP4Tensor,
    check_mxfp4,
    decode_e8m0,
    dequantize_mxfp4,
    quantize_mxfp4,
)
from tests.quantization.values import weights


def random_mxfp4(shape: tuple[int, ...], low: int = 1, high: int = 252, seed: int = 0) -> MXFP4Tensor:
    """Random blocks [*shape, 16], with scale bytes from `low` to `high`."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return MXFP4Tensor(blocks, torch.randint(low, high + 1, shape, dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(low=st.integers(0, 254), span=st.integers(0, 254), seed=st.integers(0, 99))
def test_values_are_transformers(dtype: torch.dtype, low: int, span: int, seed: int) -> None:
    ours = random_mxfp4((2, 3, 4), low, min(low + span, 254), seed)
    theirs = convert_moe_packed_tensors(ours.blocks, ours.scales, dtype=dtype).transpose(1, 2)
    values = dequantize_mxfp4(ours, dtype)
    assert values.shape == (2, 3, 128) and values.dtype == dtype
    assert torch.equal(values, theirs)


def test_scales_are_powers_of_two() -> None:
    scales = torch.arange(255, dtype=torch.uint8)
    assert decode_e8m0(scales).tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@given(weights(32, (torch.float32, torch.bfloat16)))
def test_encoding(weight: torch.Tensor) -> None:
    ours = quantize_mxfp4(weight, "w")
    blocks = weight.double().unflatten(-1, (-1, 32))
    amax, scale = blocks.abs().amax(-1), decode_e8m0(ours.scales).double()
    assert bool((amax <= 6 * scale).all())
    least = (amax > 3 * scale) | (ours.scales == 0)
    assert bool(least.all())
    values = dequantize_mxfp4(ours, torch.float32).double().unflatten(-1, (-1, 32))
    # Half a step: of at most 2, towards 6.
    assert bool(((values - blocks).abs() <= scale[..., None]).all())
    again = quantize_mxfp4(dequantize_mxfp4(ours, torch.float32), "w")
    assert torch.equal(dequantize_mxfp4(again, torch.float32), dequantize_mxfp4(ours, torch.float32))


def test_encoding_is_modelopts_but_for_ties_and_zeros() -> None:
    weight = torch.randn(64, 256) * 0.02
    ours = quantize_mxfp4(weight, "w")
    packed, scales = MXFP4QTensor.quantize(weight, 32)
    assert torch.equal(ours.scales.flatten(), scales.flatten())
    assert torch.equal(ours.blocks.flatten(), packed._quantized_data.flatten())


def test_encoding_zeros() -> None:
    ours = quantize_mxfp4(torch.zeros(2, 32), "w")
    assert not ours.scales.any() and not ours.blocks.any()


def test_refuses_weights() -> None:
    with pytest.raises(UserError, match=r"tensor w: its last dimension, 48 of \[2, 48\], .* multiple of 32"):
        quantize_mxfp4(torch.zeros(2, 48), "w")
    with pytest.raises(UserError, match="tensor w: 64 of its 64 values are infinite or not a number"):
        quantize_mxfp4(torch.full((2, 32), torch.nan), "w")


def test_refuses_what_is_not_mxfp4() -> None:
    good = random_mxfp4((2, 3))
    check_mxfp4(good, "w")
    with pytest.raises(UserError, match=r"tensor w: blocks \[2, 3, 8\] and scales \[2, 3\] do not belong together"):
        check_mxfp4(MXFP4Tensor(good.blocks[..., :8], good.scales), "w")
    with pytest.raises(UserError, match=r"tensor w: blocks and scales have types torch.int8 and torch.uint8"):
        check_mxfp4(MXFP4Tensor(good.blocks.view(torch.int8), good.scales), "w")
    with pytest.raises(UserError, match="tensor w: 6 of its 6 scales are not a number"):
        check_mxfp4(MXFP4Tensor(good.blocks, torch.full_like(good.scales, 255)), "w")
