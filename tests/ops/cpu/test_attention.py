"""Attention on CPUs: what torch gives in float64, each row by itself, over nothing but what it sees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.ops.base import LayerCache, Span
from dflash_trt.ops.cpu.attention import attention
from dflash_trt.ops.torch_ops import TorchOps
from tests.models.eager import span

POSITIONS = 160
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def random_cache(dtype: torch.dtype, kv_heads: int, size: int) -> LayerCache:
    keys, values = (torch.randn(4, kv_heads, POSITIONS, size).to(dtype) for _ in range(2))
    scales = (torch.tensor(0.5), torch.tensor(0.7)) if dtype == torch.float8_e4m3fn else ()
    return LayerCache(keys, values, *scales)


def row(where: Span, sequence: int, index: int) -> Span:
    """A row of a pass as a pass of its own."""
    position = int(where.positions[sequence, index])
    return Span(where.slots[sequence, None], torch.tensor([[position]]), position + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    starts=st.lists(st.integers(0, 130), min_size=1, max_size=3),
    rows=st.integers(1, 30),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 64, 70]),
    kv_heads=st.sampled_from([1, 3]),
    group=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([8, 40, 64, 128]),
)
@settings(max_examples=25)
def test_attention(
    dtype: torch.dtype,
    starts: list[int],
    rows: int,
    causal: bool,
    window: int | None,
    kv_heads: int,
    group: int,
    size: int,
) -> None:
    cache, where = random_cache(dtype, kv_heads, size), span(starts, rows, list(range(len(starts)))[::-1])
    q = torch.randn(len(starts), rows, kv_heads * group, size).transpose(1, 2)
    actual = attention(q, cache, where, causal=causal, window=window)

    ops = TorchOps()
    exact = LayerCache(
        *(part if cache.key_scale is not None else part.double() for part in (cache.keys, cache.values)),
        cache.key_scale,
        cache.value_scale,
    )
    mask = ops.attention_mask(where, causal=causal, window=window)
    torch.testing.assert_close(
        actual, ops.attention(q.double(), exact, where, mask), rtol=0, atol=2e-5, check_dtype=False
    )

    if causal:
        for sequence in range(len(starts)):
            index = rows // 2
            alone = attention(
                q[sequence : sequence + 1, :, index : index + 1],
                cache,
                row(where, sequence, index),
                causal=True,
                window=window,
            )
            assert torch.equal(alone[0, :, 0], actual[sequence, :, index])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
def test_what_a_row_does_not_see_has_no_part_in_it(dtype: torch.dtype, window: int | None) -> None:
    cache, where = random_cache(dtype, 2, 40), span([70], 6)
    q = torch.randn(1, 4, 6, 40)
    expected = attention(q, cache, where, causal=True, window=window)
    nan = torch.tensor(float("nan")).to(dtype)
    for part in (cache.keys, cache.values):
        part[0, :, 74:] = nan
    actual = attention(q, cache, where, causal=True, window=window)
    assert torch.equal(actual[:, :, :4], expected[:, :, :4]) and bool(actual[:, :, 4:].isnan().all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, where = random_cache(torch.float32, 3, 64), span([100, 3], 40)
    q = torch.randn(2, 9, 40, 64)
    alone = attention(q, cache, where, causal=True, window=None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(attention(q, cache, where, causal=True, window=None), alone) for _ in range(10))
