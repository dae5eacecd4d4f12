"""Four-bit floats against ModelOpt and against a search of the nearest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from dflash_trt.quantization.e2m1 import E2M1_VALUES, decode_e2m1, encode_e2m1, pack_e2m1


def test_values_encode_to_their_codes() -> None:
    values = torch.tensor(E2M1_VALUES)
    expected = torch.arange(16, dtype=torch.uint8)
    expected[8] = 0  # -0.0
    assert torch.equal(encode_e2m1(values), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundaries_and_their_neighbours(dtype: torch.dtype) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    below, above = (torch.nextafter(ties, torch.tensor(end, dtype=dtype)) for end in (0.0, 9.0))
    lower = torch.arange(7, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(below), lower)
    assert torch.equal(encode_e2m1(ties), lower + lower % 2)
    assert torch.equal(encode_e2m1(above), lower + 1)
    assert torch.equal(encode_e2m1(-above), lower + 9)


def test_saturates() -> None:
    values = torch.tensor([5.1, 6.0, 7.0, 1e30, float("inf")])
    assert encode_e2m1(values).tolist() == [7] * 5
    assert encode_e2m1(-values).tolist() == [15] * 5


def test_sign_of_what_rounds_to_zero() -> None:
    values = torch.tensor([0.0, -0.0, 0.25, -0.25, 1e-45, -1e-45])
    assert encode_e2m1(values).tolist() == [0, 0, 0, 8, 0, 8]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_codes_are_modelopts(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(encode_e2m1(tensor), NVFP4QTensor._cast_fp4(tensor.clone()))


def test_codes_are_modelopts_on_a_grid() -> None:
    """Every sixteenth of a step, and each one's neighbours."""
    grid = torch.arange(-7, 7, 1 / 32)
    tensor = torch.cat([grid, grid.nextafter(torch.tensor(9.0)), grid.nextafter(torch.tensor(-9.0))])
    assert torch.equal(encode_e2m1(tensor), NVFP4QTensor._cast_fp4(tensor.clone()))


def test_packs_the_even_index_in_the_low_nibble() -> None:
    packed = pack_e2m1(encode_e2m1(torch.tensor([[0.5, -6.0], [1.0, 3.0]])))
    assert packed.tolist() == [[0xF1], [0x52]]
    assert torch.equal(decode_e2m1(packed), torch.tensor([[0.5, -6.0], [1.0, 3.0]]))


def test_every_byte_survives() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    values = decode_e2m1(packed)
    assert values.shape == (2, 8, 32) and values.dtype == torch.float32
    low, high = packed & 15, packed >> 4
    codes = torch.stack((low, high), dim=-1).flatten(-2)
    assert torch.equal(values, torch.tensor(E2M1_VALUES)[codes.int()])
    assert torch.equal(values.signbit(), codes >= 8)
    assert torch.equal(pack_e2m1(codes), packed)


def test_takes_views_of_any_stride() -> None:
    values = torch.randn(8, 6).t()
    assert torch.equal(pack_e2m1(encode_e2m1(values)), pack_e2m1(encode_e2m1(values.contiguous())))
