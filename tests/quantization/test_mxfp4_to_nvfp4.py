"""The exact conversion, and ModelOpt's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.export.shard_cast_utils import mxfp4_kmax, quantize_mxfp4_to_nvfp4_lossless
from modelopt.torch.quantization.utils.numeric_utils import mxfp4_to_nvfp4_global_amax

from dflash_trt.errors import UserError
from dflash_trt.quantization.mxfp4 import MXFP4Tensor, dequantize_mxfp4
from dflash_trt.quantization.mxfp4_to_nvfp4 import inexact_blocks, largest_exponent, mxfp4_to_nvfp4
from dflash_trt.quantization.nvfp4 import dequantize_nvfp4
from tests.quantization.test_mxfp4 import random_mxfp4


@given(low=st.integers(1, 252), span=st.integers(0, 17), seed=st.integers(0, 99))
def test_values_are_kept_exactly(low: int, span: int, seed: int) -> None:
    source = random_mxfp4((3, 2, 4), low, min(low + span, 252), seed)
    assert inexact_blocks(source.scales, largest_exponent(source.scales)) == 0
    converted = mxfp4_to_nvfp4(source, "w")
    assert converted.weight.shape == (3, 2, 64) and converted.weight_scale.shape == (3, 2, 8)
    values = dequantize_nvfp4(converted)
    assert torch.equal(values, dequantize_mxfp4(source, torch.float32))
    assert torch.equal(values.signbit(), dequantize_mxfp4(source, torch.float32).signbit())


@given(low=st.integers(0, 252), span=st.integers(0, 60), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_tensors_are_modelopts(low: int, span: int, extra: int, seed: int) -> None:
    source = (
        random_mxfp4((5, 4), low, min(low + span, 252 - extra), seed) if low + extra <= 252 else random_mxfp4((5, 4))
    )
    k_max = largest_exponent(source.scales)
    assert k_max == mxfp4_kmax(source.scales)
    k_max += extra
    ours = mxfp4_to_nvfp4(source, "w", k_max)
    packed, scale, scale_2, blocks, exact = quantize_mxfp4_to_nvfp4_lossless(
        source.blocks.flatten(-2), source.scales, k_max, "cpu"
    )
    assert torch.equal(ours.weight_scale_2, scale_2)
    assert torch.equal(ours.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(dequantize_nvfp4(ours), dequantize_nvfp4(ours._replace(weight=packed)))
    assert inexact_blocks(source.scales, k_max) == blocks - exact


def test_bytes_are_modelopts_but_for_the_sign_of_zero() -> None:
    source = random_mxfp4((8, 4), 100, 130)
    ours = mxfp4_to_nvfp4(source, "w")
    packed, *_ = quantize_mxfp4_to_nvfp4_lossless(
        source.blocks.flatten(-2), source.scales, largest_exponent(source.scales), "cpu"
    )
    for ours_nibble, theirs in ((ours.weight & 15, packed & 15), (ours.weight >> 4, packed >> 4)):
        apart = ours_nibble != theirs
        assert bool(((ours_nibble == 8) & (theirs == 0))[apart].all())


def test_scale_2_is_of_modelopts_amax() -> None:
    scales = torch.tensor([[100, 117, 90, 0]], dtype=torch.uint8)
    amax, info = mxfp4_to_nvfp4_global_amax(scales)
    source = MXFP4Tensor(torch.zeros(1, 4, 16, dtype=torch.uint8), scales)
    assert float(mxfp4_to_nvfp4(source, "w").weight_scale_2) == amax / (6 * 448)
    assert inexact_blocks(scales, largest_exponent(scales)) == info["n_total_blocks"] - info["n_lossless_blocks"] == 1


def test_small_blocks_are_rounded() -> None:
    """A block 18 exponents down has a scale twice too large: each of its values is halved, and rounded to even."""
    blocks = torch.tensor([0x10, 0x32, 0x54, 0x76] * 4, dtype=torch.uint8).expand(1, 2, 16)
    source = MXFP4Tensor(blocks, torch.tensor([[127, 109]], dtype=torch.uint8))
    values = dequantize_nvfp4(mxfp4_to_nvfp4(source, "w")).view(2, 32)
    assert values[0, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (values[1, :8] * 2**18).tolist() == [0, 0, 1, 2, 2, 3, 4, 6]


def test_only_zeros() -> None:
    source = MXFP4Tensor(torch.zeros(2, 1, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    assert not dequantize_nvfp4(mxfp4_to_nvfp4(source, "w")).any()


def test_refuses_nan_and_too_small_a_maximum() -> None:
    source = random_mxfp4((1, 2), 130, 130)
    with pytest.raises(ValueError, match="tensor w: k_max is 2, but a block has the exponent 3"):
        mxfp4_to_nvfp4(source, "w", k_max=2)
    with pytest.raises(UserError, match="tensor w: 2 of its 2 scales are not a number"):
        mxfp4_to_nvfp4(source._replace(scales=torch.full((1, 2), 255, dtype=torch.uint8)), "w")
