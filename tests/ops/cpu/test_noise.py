"""Noise on CPUs is that of torch, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.ops.cpu.noise import gumbel
from dflash_trt.plugins import noise

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    seeds=st.lists(INT64, min_size=1, max_size=3),
    position=st.integers(0, 2**31),
    tokens=st.integers(1, 400),
    first=st.integers(0, 10**6),
)
@settings(max_examples=60)
def test_any_shape(dtype: torch.dtype, seeds: list[int], position: int, tokens: int, first: int) -> None:
    seed, positions = torch.tensor(seeds)[:, None].expand(-1, 2), position + torch.arange(2).expand(len(seeds), -1)
    expected = noise.gumbel(seed, positions, tokens, dtype, first)
    assert torch.equal(gumbel(seed, positions, tokens, dtype, first), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_whole_vocabulary_on_several_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.tensor([[7], [2**62 + 11]]), torch.tensor([[5], [6]])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for dtype in (torch.float32, torch.float64):
        expected = noise.gumbel(seeds, positions, 49_152, dtype)
        assert torch.equal(gumbel(seeds, positions, 49_152, dtype), expected)


@pytest.mark.parametrize(("position", "token"), [(7, 663_870), (20, 3_403_563)])
def test_words_at_either_end(position: int, token: int) -> None:
    """Of seed 0: one that float32 would round to 1, and one of the least."""
    where = torch.tensor([[0]]), torch.tensor([[position]])
    for dtype in (torch.float32, torch.float64):
        found = gumbel(*where, 1, dtype, token)
        assert torch.equal(found, noise.gumbel(*where, 1, dtype, token)) and bool(found.isfinite())
    assert found.abs() > 2.8
