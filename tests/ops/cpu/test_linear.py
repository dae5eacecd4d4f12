"""Linear layers on CPUs: what they are, and that no row's bits depend on the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_trt.ops.cpu.linear import linear
from dflash_trt.quantization.fp8 import FP8Tensor, dequantize_fp8, quantize_fp8
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, dequantize_nvfp4, quantize_nvfp4

FORMATS = ["float32", "bfloat16", "float16", "FP8", "NVFP4"]


def stored(weight: Tensor, format_: str) -> tuple[Tensor | FP8Tensor | NVFP4Tensor, Tensor]:
    """A weight in a format, and the numbers that it then stands for."""
    if format_ == "FP8":
        fp8 = quantize_fp8(weight, "w")
        return fp8, dequantize_fp8(fp8)
    if format_ == "NVFP4":
        nvfp4 = quantize_nvfp4(weight, "w")
        return nvfp4, dequantize_nvfp4(nvfp4)
    narrow = weight.to(getattr(torch, format_))
    return narrow, narrow.float()


@pytest.mark.parametrize("format_", FORMATS)
@given(
    rows=st.integers(1, 40),
    out_features=st.integers(1, 150),
    blocks=st.integers(1, 40),
    left=st.integers(0, 15),
    data=st.data(),
)
@settings(max_examples=30)
def test_a_row_is_the_same_alone_and_among_others(
    format_: str, rows: int, out_features: int, blocks: int, left: int, data: st.DataObject
) -> None:
    features = 16 * blocks - (0 if format_ == "NVFP4" else left)
    weight, values = stored(torch.randn(out_features, features), format_)
    x = torch.randn(rows, features)
    together = linear(x, weight)
    # Of sums whose terms have about one magnitude, an error of a unit in the last place for each addition of a lane.
    bound = 2.0**-23 * features * (x.abs().double() @ values.abs().double().T)
    assert bool(((together - x.double() @ values.double().T).abs() <= bound).all())
    start = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(start + 1, rows))
    assert torch.equal(linear(x[start:end], weight), together[start:end])


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(format_: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = stored(torch.randn(1000, 576), format_)
    x = torch.randn(9, 576)
    alone = linear(x, weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(linear(x, weight), alone) for _ in range(20))


def test_every_code_of_e4m3_and_e2m1() -> None:
    """Read in registers, by arithmetic on their bits: subnormals, zeros and both signs."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    one = torch.ones(2, 1)
    for rows in (1, 2):
        fp8 = linear(one[:rows], FP8Tensor(numbers[:, None], torch.tensor(1.0)))
        assert torch.equal(fp8, numbers.float().expand(rows, -1))
        packed = NVFP4Tensor(
            codes.repeat_interleave(8).view(256, 8),
            torch.full((256, 1), 0.0625).to(torch.float8_e4m3fn),
            torch.tensor(2.0),
        )
        identity = torch.eye(16)[:rows]
        expected = dequantize_nvfp4(packed).T[:rows]
        assert torch.equal(linear(identity, packed), expected)


@pytest.mark.parametrize("format_", ["float32", "bfloat16", "FP8"])
def test_weights_that_lie_at_any_address(format_: str) -> None:
    """As tensors of a mapped file may."""
    weight, _ = stored(torch.randn(40, 48), format_)
    held = weight.weight if isinstance(weight, FP8Tensor) else weight
    assert isinstance(held, Tensor)
    memory = torch.empty(held.nbytes + 1, dtype=torch.uint8)[1:]
    memory.copy_(held.reshape(-1).view(torch.uint8))
    moved = torch.frombuffer(memory.numpy(), dtype=held.dtype).view(held.shape)
    x = torch.randn(5, 48)
    there = FP8Tensor(moved, weight.weight_scale) if isinstance(weight, FP8Tensor) else moved
    assert torch.equal(linear(x, there), linear(x, weight))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_not_finite_stays_in_its_row(rows: int) -> None:
    x, weight = torch.randn(rows + 1, 40), torch.randn(30, 40)
    x[0, 7] = float("nan")
    y = linear(x, weight)
    assert bool(y[0].isnan().all()) and torch.equal(y[1:], linear(x[1:], weight))
