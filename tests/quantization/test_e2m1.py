"""Four-bit floats against ModelOpt and against a search of the nearest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from dflash_trt.quantization.e2m1 import E2M1_VALUES, decode_e2m1, encode_e2m1


def codes_of(values: torch.Tensor) -> torch.Tensor:
    """One code a byte, of as many values as there are: [n] to uint8 [n]."""
    return unpacked(encode_e2m1(torch.cat((values, values))))[: len(values)]


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def modelopt_codes(values: torch.Tensor) -> torch.Tensor:
    return NVFP4QTensor._cast_fp4(values.clone())


def test_values_encode_to_their_codes() -> None:
    expected = torch.arange(16, dtype=torch.uint8)
    expected[8] = 0  # -0.0
    assert torch.equal(codes_of(torch.tensor(E2M1_VALUES)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundaries_and_their_neighbours(dtype: torch.dtype) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    below, above = (torch.nextafter(ties, torch.tensor(end, dtype=dtype)) for end in (0.0, 9.0))
    lower = torch.arange(7, dtype=torch.uint8)
    assert torch.equal(codes_of(below), lower)
    assert torch.equal(codes_of(ties), lower + lower % 2)
    assert torch.equal(codes_of(above), lower + 1)
    assert torch.equal(codes_of(-above), lower + 9)


def test_saturates() -> None:
    values = torch.tensor([5.1, 6.0, 7.0, 1e30, float("inf")])
    assert codes_of(values).tolist() == [7] * 5
    assert codes_of(-values).tolist() == [15] * 5


def test_sign_of_what_rounds_to_zero() -> None:
    values = torch.tensor([0.0, -0.0, 0.25, -0.25, 1e-45, -1e-45])
    assert codes_of(values).tolist() == [0, 0, 0, 8, 0, 8]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_codes_are_modelopts(values: list[float]) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(codes_of(tensor), modelopt_codes(tensor))


def test_codes_are_modelopts_on_a_grid() -> None:
    """Every thirty-second, and each one's neighbours."""
    grid = torch.arange(-7, 7, 1 / 32)
    tensor = torch.cat([grid, grid.nextafter(torch.tensor(9.0)), grid.nextafter(torch.tensor(-9.0))])
    assert torch.equal(codes_of(tensor), modelopt_codes(tensor))


def test_every_pair_of_values_packs_the_even_index_in_the_low_nibble() -> None:
    values = torch.tensor(E2M1_VALUES)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    packed = encode_e2m1(pairs)
    assert packed.shape == (256, 1)
    assert torch.equal(unpacked(packed), modelopt_codes(pairs))
    assert torch.equal(decode_e2m1(packed), pairs)
    assert encode_e2m1(torch.tensor([[0.5, -6.0], [1.0, 3.0]])).tolist() == [[0xF1], [0x52]]


def test_not_a_number_is_some_code() -> None:
    packed = encode_e2m1(torch.tensor([float("nan"), 1.0, 2.0, float("nan")]))
    assert unpacked(packed)[1:3].tolist() == [2, 4]


def test_every_byte_decodes() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    values = decode_e2m1(packed)
    assert values.shape == (2, 8, 32) and values.dtype == torch.float32
    codes = unpacked(packed)
    assert torch.equal(values, torch.tensor(E2M1_VALUES)[codes.int()])
    assert torch.equal(values.signbit(), codes >= 8)


def test_takes_views_of_any_stride() -> None:
    values = torch.randn(8, 6).t()
    packed = encode_e2m1(values)
    assert torch.equal(packed, encode_e2m1(values.contiguous()))
    assert torch.equal(decode_e2m1(packed.t()), decode_e2m1(packed.t().contiguous()))
    assert torch.equal(decode_e2m1(packed[:, ::2]), decode_e2m1(packed[:, ::2].contiguous()))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    packed = encode_e2m1(torch.zeros(*shape[:-1], 2 * shape[-1]))
    assert packed.shape == shape and packed.dtype == torch.uint8
    assert decode_e2m1(packed).shape == (*shape[:-1], 2 * shape[-1])
