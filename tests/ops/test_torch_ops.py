"""The eager operations against their definitions, written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.quantization.fp8 import FP8Tensor, dequantize_fp8, quantize_fp8
from dflash_trt.quantization.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from tests.closeness import last_places
from tests.models.eager import span

OPS = TorchOps()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_linear_of_a_quantized_weight(dtype: torch.dtype, algo: str, bias: bool) -> None:
    """Decoded in parts: of 64 columns, 9,001 rows are more than one. The bytes are held to ModelOpt's elsewhere."""
    weight, x = torch.randn(9001, 64), torch.randn(2, 3, 64, dtype=dtype)
    packed = quantize_fp8(weight, "w") if algo == "FP8" else quantize_nvfp4(weight, "w")
    decoded = dequantize_fp8(packed) if isinstance(packed, FP8Tensor) else dequantize_nvfp4(packed)
    linear = Linear(packed, torch.randn(9001, dtype=dtype) if bias else None)
    expected = F.linear(x.double(), decoded.double())
    expected = expected if linear.bias is None else expected + linear.bias.double()
    # Weights are float32 products of codes and scales here, and there sums are scaled: two roundings to float32 apart.
    tolerance = {} if dtype == torch.bfloat16 else last_places(96)
    torch.testing.assert_close(OPS.linear(x, linear), expected.to(dtype), **tolerance)


def test_linear_quantizes_what_it_is_given_where_it_has_a_scale() -> None:
    """In e4m3 times a half, 0.1 is 0.203125 / 2 and 1,000 the largest there is; in e2m1 a block is scaled by its amax."""
    x, scale = torch.tensor([[0.1, 1000.0, -1000.0, 0.0] * 8]), torch.tensor(0.5)
    identity = torch.eye(32)
    fp8 = Linear(FP8Tensor(identity.to(torch.float8_e4m3fn), torch.tensor(1.0)), input_scale=scale)
    assert OPS.linear(x, fp8)[0, :4].tolist() == [0.1015625, 224.0, -224.0, 0.0]
    assert torch.equal(OPS.linear(x, Linear(fp8.weight)), x)
    nvfp4 = Linear(quantize_nvfp4(identity, "w"), input_scale=scale)
    actual = OPS.linear(x, nvfp4)[0, :4]  # the block's scale is e4m3(1000 / 3) = 320
    torch.testing.assert_close(actual, torch.tensor([0.0, 960.0, -960.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_rows_of_a_quantizing_layer_do_not_know_of_each_other(algo: str, dtype: torch.dtype) -> None:
    """To the bit: the last one may decide how the next layer rounds, and with it a token."""
    weight, x = torch.randn(192, 576), torch.randn(1, 64, 576, dtype=dtype)
    packed = quantize_fp8(weight, "w") if algo == "FP8" else quantize_nvfp4(weight, "w")
    linear = Linear(packed, torch.randn(192, dtype=dtype), torch.tensor(0.01))
    together = OPS.linear(x, linear)
    for rows in (1, 3, 8):
        assert torch.equal(together, torch.cat([OPS.linear(part, linear) for part in x.split(rows, 1)], 1))


def test_attention_that_leads_to_a_quantization_does_not_show_how_many_rows_a_pass_has() -> None:
    ops = TorchOps(quantizes_activations=True)
    cache = LayerCache(torch.randn(1, 3, 64, 64), torch.randn(1, 3, 64, 64))
    q = torch.randn(1, 9, 8, 64)

    def attended(first: int, rows: int) -> torch.Tensor:
        where = span([40 + first], rows)
        mask = ops.attention_mask(where, causal=True, window=None)
        return ops.attention(q[:, :, first : first + rows], cache, where, mask)

    assert torch.equal(attended(0, 8), torch.cat([attended(row, 1) for row in range(8)], 2))


def test_fp8_sums_are_those_of_the_codes() -> None:
    weight, x = quantize_fp8(torch.randn(64, 576), "w"), torch.randn(1, 5, 576)
    scale = torch.tensor(0.01)
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    expected = (codes @ weight.weight.double().T) * (weight.weight_scale.double() * scale)
    assert torch.equal(OPS.linear(x, Linear(weight, input_scale=scale)), expected.float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fp8_cache(dtype: torch.dtype) -> None:
    """Keys and values are rounded to e4m3 in units of their scales, and clipped; attention sees them so."""
    zeros = torch.zeros(2, 1, 6, 4, dtype=torch.float8_e4m3fn)
    cache = LayerCache(zeros.clone(), zeros.clone(), torch.tensor(0.25), torch.tensor(2.0))
    where = span([3], 1, [1])
    k = torch.tensor([0.26, -300.0, 19.0, 0.0], dtype=dtype).view(1, 1, 1, 4)
    cache = OPS.kv_cache_update(cache, k, 4 * k, where)
    assert cache.keys.dtype == cache.values.dtype == torch.float8_e4m3fn and cache.keys.nbytes == 2 * 6 * 4
    assert cache.keys[1, 0, 3].tolist() == [1.0, -448.0, 80.0, 0.0]  # 1.04, -1200, 76 (a tie, to even), 0
    assert cache.values[1, 0, 3].tolist() == [0.5, -448.0, 40.0, 0.0]  # 0.52, -600, 38 (a tie), 0
    assert not cache.keys[0].float().any() and not cache.keys[1, :, :3].float().any()
    only_it = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    only_it[..., 3] = True
    seen = OPS.attention(torch.ones(1, 1, 1, 4, dtype=dtype), cache, where, only_it)
    assert seen.dtype == dtype and seen.flatten().tolist() == [1.0, -896.0, 80.0, 0.0]


@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    rows=st.integers(1, 5),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 50]),
    kv_heads=st.sampled_from([1, 2]),
    in_order=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_attention_over_the_cache(
    starts: list[int], rows: int, causal: bool, window: int | None, kv_heads: int, in_order: bool
) -> None:
    """Each row alone, over exactly the keys that its mask lets it see; stale rows of other lengths are never seen."""
    batch, heads, size = len(starts), 4, 8
    slots = list(range(batch)) if in_order else list(range(3, 3 - batch, -1))
    where = span(starts, rows, None if in_order else slots)
    stale = (4, kv_heads, 20, size)
    cache = LayerCache(torch.randn(stale, dtype=torch.float64), torch.randn(stale, dtype=torch.float64))
    k, v = (torch.randn(batch, kv_heads, rows, size, dtype=torch.float64) for _ in range(2))
    q = torch.randn(batch, heads, rows, size, dtype=torch.float64)

    cache = OPS.kv_cache_update(cache, k, v, where)
    actual = OPS.attention(q, cache, where, OPS.attention_mask(where, causal=causal, window=window))

    for i, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        torch.testing.assert_close(cache.keys[slot, :, start : start + rows], k[i])
        torch.testing.assert_close(cache.values[slot, :, start : start + rows], v[i])
        for row in range(rows):
            position = start + row
            seen = [
                key
                for key in range(start + rows)
                if (key <= position or not causal) and (window is None or abs(position - key) < window)
            ]
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = cache.keys[slot, group, seen] @ q[i, head, row] / math.sqrt(size)
                expected = scores.softmax(0) @ cache.values[slot, group, seen]
                torch.testing.assert_close(actual[i, head, row], expected)


@pytest.mark.parametrize("where_bad", ["keys", "values"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_masked_is_not_read(dtype: torch.dtype, fp8_cache: bool, bad: float, where_bad: str) -> None:
    """Row 2 of sequence 0 is not finite, and neither is what an earlier pass left past the end of sequence 1.

    Rows before it are to the bit what they are if it is finite, whatever the number of rows; it and those after it are
    not finite.
    """
    where, scale = span([3, 9], 4), torch.tensor(0.05) if fp8_cache else None
    shape = (2, 2, 20, 8)
    past = torch.randn(2, *shape).to(torch.float8_e4m3fn if fp8_cache else dtype)
    given = torch.randn(2, 2, 2, 4, 8).to(dtype)
    q = torch.randn(2, 4, 4, 8).to(dtype)

    def attended(value: float, stale: float) -> torch.Tensor:
        cache = LayerCache(past[0].clone(), past[1].clone(), scale, scale)
        left = torch.full((2, 2, 2, 1, 8), stale, dtype=dtype)
        OPS.kv_cache_update(cache, left[0], left[1], span([7, 13], 1))
        new = given.clone()
        new[0 if where_bad == "keys" else 1, 0, :, 2, 3] = value
        OPS.kv_cache_update(cache, new[0], new[1], where)
        assert cache.values.isfinite().all() if not fp8_cache else not cache.values.isnan().any()
        return OPS.attention(q, cache, where, OPS.attention_mask(where, causal=True, window=None))

    actual, expected = attended(bad, bad), attended(0.5, 0.5)
    assert torch.equal(actual[0, :, :2], expected[0, :, :2]) and torch.equal(actual[1], expected[1])
    assert not actual[0, :, 2:].isfinite().any() and expected.isfinite().all()


def test_rotation_pairs_the_halves() -> None:
    """(x_i, x_{i + d/2}) turns by its angle, as NeoX pairs them."""
    angles = torch.rand(30, 4, dtype=torch.float64) * 6
    x, where = torch.randn(2, 3, 5, 8, dtype=torch.float64), span([0, 20], 5)
    rotated = OPS.rotary_embedding(x, OPS.rotary_rows(RotaryTable(angles.cos(), angles.sin()), where))
    pairs = torch.complex(x[..., :4], x[..., 4:])
    turns = torch.polar(torch.ones_like(angles), angles)[where.positions][:, None]
    torch.testing.assert_close(torch.complex(rotated[..., :4], rotated[..., 4:]), pairs * turns)


def test_expand_vocabulary() -> None:
    logits, offsets = torch.randn(2, 3, 4), torch.tensor([1, 1, 5, 6])
    full = OPS.expand_vocabulary(logits, offsets, 12)
    assert torch.equal(full[..., [1, 2, 7, 9]], logits)
    assert int(torch.isinf(full).sum()) == 2 * 3 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_of_narrow_types_is_taken_in_float32(dtype: torch.dtype) -> None:
    """Squares of 300 overflow float16; the norm does not."""
    x, weight = torch.full((1, 1, 64), 300.0, dtype=dtype), torch.full((64,), 0.5, dtype=dtype)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-6), torch.full((1, 1, 64), 0.5, dtype=dtype))
