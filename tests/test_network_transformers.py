"""Rotary embedding, caches, attention and quantization, against plain torch and ml_dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import tensorrt_rtx as trt
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.closeness import close
from tests.network_bench import Bench
from tests.network_formats import NetworkFault

SOFTMAX = trt.AttentionNormalizationOp.SOFTMAX
CAUSAL = trt.CausalMaskKind


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [0, 4])
def test_rotary_embedding_is_a_complex_product(interleaved: bool, turned: int) -> None:
    x, width = torch.randn(2, 3, 5, 8), turned or 8
    positions, angles = torch.randint(0, 20, (2, 5)), torch.randn(20, width // 2)
    bench = Bench()
    layer = bench.network.add_rotary_embedding(
        bench.input(x, (-1, 3, -1, 8)), bench.input(angles.cos()), bench.input(angles.sin()), interleaved, turned
    )
    layer.set_input(3, bench.input(positions, (-1, -1)))
    part = x[..., :width]
    pairs = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    product = torch.complex(*pairs) * torch.polar(torch.ones(2, 1, 5, width // 2), angles[positions][:, None])
    a, b = product.real, product.imag
    expected = torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)
    assert close(bench.value(layer), torch.cat((expected, x[..., width:]), dim=-1))


def test_rotary_embedding_by_rows_without_positions() -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 4)
    bench = Bench()
    cos, sin = bench.input(angles.cos()), bench.input(angles.sin())
    value = bench.value(bench.network.add_rotary_embedding(bench.input(x), cos, sin, False, 0))
    c, s = angles.cos()[:, None].repeat(1, 1, 1, 2), angles.sin()[:, None].repeat(1, 1, 1, 2)
    assert close(value, x * c + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * s)


def test_a_position_past_the_table_is_refused() -> None:
    bench = Bench()
    table = bench.input(torch.zeros(4, 4))
    layer = bench.network.add_rotary_embedding(bench.input(torch.zeros(1, 1, 1, 8)), table, table, False, 0)
    layer.set_input(3, bench.input(torch.tensor([[4]])))
    with pytest.raises(NetworkFault, match=r"\(ROTARY_EMBEDDING\): positions up to 4 in a table of 4"):
        bench.value(layer)


def test_a_cache_is_written_where_each_sequence_stands_and_not_past_its_end() -> None:
    cache, update = torch.zeros(3, 2, 6, 4).bfloat16(), torch.randn(3, 2, 3, 4).bfloat16()
    bench = Bench()
    layer = bench.network.add_kv_cache_update(
        bench.input(cache),
        bench.input(update),
        bench.input(torch.tensor([0, 4, 9], dtype=torch.int32)),
        trt.KVCacheMode.LINEAR,
    )
    value = bench.value(layer)
    assert value[0, :, :3].equal(update[0]) and not value[0, :, 3:].any()
    assert value[1, :, 4:].equal(update[1, :, :2]) and not value[1, :, :4].any()
    assert not value[2].any()
    assert not cache.any(), "the input itself is left as it was"


def attended(
    q: Tensor, k: Tensor, v: Tensor, *, kind: trt.CausalMaskKind = CAUSAL.NONE, mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    bench = Bench()
    layer = bench.network.add_attention_v2(*(bench.input(x, (-1, *x.shape[1:])) for x in (q, k, v)), SOFTMAX, kind)
    layer.decomposable = True
    if mask is not None:
        layer.mask = bench.input(mask)
    if lengths is not None:
        layer.key_value_lengths = bench.input(torch.tensor(lengths, dtype=torch.int32), (-1,))
    return bench.value(layer.get_output(0))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Row by row, head by head; no scale."""
    result = torch.zeros_like(q)
    for b, h, t in np.ndindex(*q.shape[:3]):
        keys, values = k[b, h * k.shape[1] // q.shape[1]], v[b, h * k.shape[1] // q.shape[1]]
        seen = visible[b, t].nonzero()[:, 0]
        weights = torch.stack([(q[b, h, t].double() * keys[s].double()).sum() for s in seen]).softmax(0)
        result[b, h, t] = sum(w * values[s].double() for w, s in zip(weights, seen, strict=True)).to(q.dtype)
    return result


@given(
    batch=st.integers(1, 3), rows=st.integers(1, 4), keys=st.integers(4, 9), ratio=st.sampled_from([1, 2, 4]),
    masked=st.sampled_from(["not", "bool", "added", "lengths", "upper", "lower"]), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_attention(batch: int, rows: int, keys: int, ratio: int, masked: str, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, 8) for heads, n in ((2 * ratio, rows), (2, keys), (2, keys)))
    visible = torch.ones(batch, rows, keys, dtype=torch.bool)
    row, key = torch.arange(rows)[:, None], torch.arange(keys)
    lengths = torch.randint(1, keys + 1, (batch,))
    if masked in ("bool", "added"):
        visible = torch.rand(batch, rows, keys) < 0.5
        visible[..., 0] = True
    elif masked == "lengths":
        visible = visible & (key < lengths[:, None, None])
    elif masked in ("upper", "lower"):
        visible = visible & (key <= row + (keys - rows if masked == "lower" else 0))
    mask = {"bool": visible[:, None], "added": torch.where(visible, 0.0, -torch.inf)[:, None]}.get(masked)
    kind = {"upper": CAUSAL.UPPER_LEFT, "lower": CAUSAL.LOWER_RIGHT}.get(masked, CAUSAL.NONE)
    value = attended(q, k, v, mask=mask, kind=kind, lengths=lengths.tolist() if masked == "lengths" else None)
    assert close(value, softmax_attention(q, k, v, visible))


def test_attention_is_torchs_without_its_scale() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    assert close(attended(q, k, v), F.scaled_dot_product_attention(q, k, v, scale=1.0))


def test_attention_adds_a_mask_of_numbers() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    bias = torch.randn(2, 1, 6, 6)
    assert close(attended(q, k, v, mask=bias), F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0))


def test_a_deprecated_causal_attention_is_upper_left() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    bench = Bench()
    layer = bench.network.add_attention(bench.input(q), bench.input(k), bench.input(v), SOFTMAX, True)
    assert close(bench.value(layer.get_output(0)), F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0))


def test_attention_is_rounded_once_to_its_type() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8).bfloat16() for _ in range(3))
    wide = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=1.0)
    assert attended(q, k, v).equal(wide.bfloat16())


def test_lower_right_of_shorter_sequences_is_refused() -> None:
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 6, 8)
    assert attended(q, k, k, kind=CAUSAL.LOWER_RIGHT, lengths=[6, 6]).equal(attended(q, k, k, kind=CAUSAL.LOWER_RIGHT))
    with pytest.raises(NetworkFault, match=r"LOWER_RIGHT of lengths \[5, 6\] in 6 keys is undefined: use a mask"):
        attended(q, k, k, kind=CAUSAL.LOWER_RIGHT, lengths=[5, 6])


X = torch.tensor([[0.3, -1000.0, 17.0, 2.25], [-0.011, 5.0, 448.0, 0.0]])


def e4m3(x: Tensor) -> Tensor:
    values = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return torch.from_numpy(values)


def test_fp8_per_tensor_and_per_axis() -> None:
    bench = Bench()
    x, network = bench.input(X, (-1, 4)), bench.network
    half = bench.constant(0.5, trt.float32)
    each = bench.constant([0.5, 1, 2, 0.25], trt.float32)
    stored = network.add_quantize(x, half, trt.fp8)
    back = network.add_dequantize(stored.get_output(0), half, trt.bfloat16)
    by_column = network.add_quantize(x, each, trt.fp8)
    by_column.axis = 1
    restored = network.add_dequantize(by_column.get_output(0), each, trt.float32)
    restored.axis = 1
    codes, whole, columns = bench.run(stored, back, restored)
    assert codes.dtype == torch.float8_e4m3fn and codes.float().equal(e4m3(X / 0.5))
    assert whole.equal((e4m3(X / 0.5) * 0.5).bfloat16())
    scales = torch.tensor([0.5, 1, 2, 0.25])
    assert columns.equal(e4m3(X / scales) * scales)


def test_int8() -> None:
    bench = Bench()
    scale = bench.constant(0.5, trt.float32)
    stored = bench.network.add_quantize(bench.input(X), scale, trt.int8)
    assert bench.value(stored).tolist() == [[1, -128, 34, 4], [0, 10, 127, 0]]


def test_nvfp4_weights_are_dequantized_by_block() -> None:
    """[4, 32] packed two in a byte, the low half first; scales [4, 2] in e4m3, themselves scaled by one number."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (4, 32), dtype=np.uint8)
    scales = rng.uniform(0.5, 400, (4, 2)).astype(ml_dtypes.float8_e4m3fn)
    bench = Bench()
    network = bench.network
    weight = bench.raw(codes[:, 0::2] | codes[:, 1::2] << 4, trt.fp4, (4, 32))
    block_scales = bench.raw(scales, trt.fp8, (4, 2))
    wide_scales = network.add_dequantize(block_scales, bench.constant(0.01, trt.float32), trt.float32)
    layer = network.add_dequantize(weight, wide_scales.get_output(0), trt.float32)
    layer.axis = 1
    product = scales.astype(np.float64) * np.float64(np.float32(0.01))
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = values.reshape(4, 2, 16) * product.astype(np.float32)[..., None]
    assert bench.value(layer).equal(torch.from_numpy(expected.reshape(4, 32)))


@given(st.integers(0, 2**31), st.sampled_from([1e-3, 0.1, 10.0]))
def test_dynamic_quantization_to_nvfp4(seed: int, size: float) -> None:
    """And back, as a linear layer does it; against the same in NumPy."""
    x = torch.randn(3, 48, generator=torch.manual_seed(seed)) * size
    x[0, :16] = 0
    scale = np.float32(x.abs().max() / (6 * 448))
    bench = Bench()
    network, second = bench.network, bench.constant(scale, trt.float32)
    layer = network.add_dynamic_quantize(bench.input(x, (-1, 48)), 1, 16, trt.fp4, trt.fp8)
    layer.set_input(1, second)
    scales = network.add_dequantize(layer.get_output(1), second, trt.float32).get_output(0)
    restored = network.add_dequantize(layer.get_output(0), scales, trt.float32)
    stored, value = bench.run(layer.get_output(1), restored)
    blocks = x.double().numpy().reshape(3, 3, 16)
    expected_scales = (np.abs(blocks).max(-1) / 6 / np.float64(scale)).astype(ml_dtypes.float8_e4m3fn)
    assert stored.float().equal(torch.from_numpy(expected_scales.astype(np.float32)))
    divisor = expected_scales.astype(np.float64) * np.float64(scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.nan_to_num(blocks / divisor[..., None]).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    expected = codes.astype(np.float32) * divisor.astype(np.float32)[..., None]
    assert value.equal(torch.from_numpy(expected.reshape(3, 48)))


def test_scales_that_do_not_fit_are_refused() -> None:
    bench = Bench()
    codes = bench.input(X.clamp(-448, 448).to(torch.float8_e4m3fn), (-1, 4))
    layer = bench.network.add_dequantize(codes, bench.constant(np.ones((1, 3)), trt.float32), trt.float32)
    with pytest.raises(NetworkFault, match=r"\(DEQUANTIZE\)"):
        bench.value(layer)
