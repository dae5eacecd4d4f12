"""Rounding, small floats and constants, against other implementations of the same formats."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import tensorrt_rtx as trt
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.network_bench import Bench
from tests.network_formats import NetworkFault, decode, encode_e2m1, encode_e4m3, encode_int8, rounded

CODES = torch.arange(256, dtype=torch.uint8)


def test_every_code_of_e4m3_is_what_torch_says() -> None:
    codes = CODES.view(torch.float8_e4m3fn)
    assert torch.equal(decode(codes, trt.fp8).nan_to_num(1000), codes.double().nan_to_num(1000))


def test_every_code_of_e2m1_is_what_ml_dtypes_says() -> None:
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert decode(CODES[:16], trt.fp4).equal(torch.from_numpy(values))


@given(
    st.lists(st.floats(-500, 500), min_size=1) | st.lists(st.integers(-7000, 7000).map(lambda n: n / 16), min_size=1)
)
def test_encoding_is_ml_dtypes_rounding_of_what_fits(numbers: list[float]) -> None:
    """From float64, with many exact ties."""
    x = torch.tensor(numbers, dtype=torch.float64)
    e4m3 = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert encode_e4m3(x).view(torch.uint8).equal(torch.from_numpy(e4m3))
    small = x / 64
    e2m1 = small.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert encode_e2m1(small).equal(torch.from_numpy(e2m1) & 15)


def test_nan_survives_where_the_format_has_one() -> None:
    nan = torch.tensor([torch.nan], dtype=torch.float64)
    assert encode_e4m3(nan).float().isnan().all()
    with pytest.raises(NetworkFault, match="NaN"):
        encode_e2m1(nan)


def test_int8_is_clipped_and_rounded_to_even() -> None:
    x = torch.tensor([-1000, -0.5, 0.5, 1.5, 127.4, 300], dtype=torch.float64)
    assert encode_int8(x).tolist() == [-128, 0, 0, 2, 127, 127]


def nearest_bfloat16(x: float) -> float:
    """By exact comparison with the neighbours; the even one where they are equally near."""
    guess = torch.tensor(x).bfloat16().view(torch.int16)
    candidates = [(guess + step).to(torch.int16) for step in (-1, 0, 1)]
    return (
        min(
            candidates,
            key=lambda bits: (abs(Fraction(bits.view(torch.bfloat16).item()) - Fraction(x)), int(bits) & 1),
        )
        .view(torch.bfloat16)
        .item()
    )


@given(st.floats(1e-30, 1e30), st.integers(-3, 3), st.booleans())
def test_bfloat16_is_rounded_once(near: float, steps: int, negative: bool) -> None:
    """A few float64 steps from the middle of two neighbours, where rounding by way of float32 goes wrong."""
    low = torch.tensor(near).bfloat16().view(torch.int16)
    middle = sum((low + step).to(torch.int16).view(torch.bfloat16).double().item() for step in (0, 1)) / 2
    x = float(np.float64(middle) + steps * np.spacing(middle)) * (-1 if negative else 1)
    assert rounded(torch.tensor([x], dtype=torch.float64), torch.bfloat16).item() == nearest_bfloat16(x)


def test_rounding_keeps_what_is_not_finite() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e300, -0.0, 1e-320], dtype=torch.float64)
    assert str(rounded(x, torch.bfloat16).tolist()) == "[inf, -inf, nan, inf, -0.0, 0.0]"


def test_constants_of_types_that_numpy_has() -> None:
    bench = Bench()
    wanted = {trt.float32: [1.5, -2.0], trt.float16: [0.5, 3.0], trt.int32: [-7, 9], trt.int64: [1 << 40, -1]}
    wanted |= {trt.int8: [-128, 3], trt.bool: [True, False]}
    values = bench.run(*(bench.constant([numbers], dtype) for dtype, numbers in wanted.items()))
    assert [value.tolist() for value in values] == [[numbers] for numbers in wanted.values()]


def test_constants_of_types_that_numpy_lacks() -> None:
    bench = Bench()
    bf16 = torch.tensor([1.5, -3.0]).bfloat16()
    fp8 = np.arange(256, dtype=np.uint8)
    packed = np.array([0x21, 0x43, 0xF8], dtype=np.uint8)
    first, second, third = bench.run(
        bench.raw(bf16.view(torch.int16).numpy(), trt.bfloat16, (2, 1)),
        bench.raw(fp8, trt.fp8, (16, 16)),
        bench.raw(packed, trt.fp4, (1, 6)),
    )
    assert first.equal(bf16[:, None])
    assert second.view(torch.uint8).equal(CODES.reshape(16, 16))
    assert third.tolist() == [[1, 2, 3, 4, 8, 15]]


def test_a_type_that_is_not_known_is_refused_by_name() -> None:
    bench = Bench()
    with pytest.raises(NetworkFault, match=r"\(CONSTANT\): no way to hold E8M0"):
        bench.value(bench.raw(np.ones(2, dtype=np.uint8), trt.e8m0, (2,)))
