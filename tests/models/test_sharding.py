"""Parts of tensors: what is cut is the whole, once, and padding is what cannot count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.models.sharding import ADDED_ONCE, IN, OUT, REPLICATED, Sharding, Split, kv_heads, local_shape, shard


def parts(tensor: torch.Tensor, sharding: Sharding, ranks: int) -> list[torch.Tensor]:
    found = [shard(tensor, sharding, rank, ranks) for rank in range(ranks)]
    assert {tuple(part.shape) for part in found} == {local_shape(tuple(tensor.shape), sharding, ranks)}
    return found


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)


@given(
    axis=st.sampled_from([OUT, IN]),
    units=st.integers(1, 40),
    width=st.integers(1, 5),
    ranks=st.integers(1, 12),
    uneven=st.sampled_from(["refuse", "pad"]),
)
def test_parts_are_the_whole(axis: int, units: int, width: int, ranks: int, uneven: str) -> None:
    rule = Split(axis, "size", units, uneven, filling=-1.0)  # type: ignore[arg-type]
    assert rule.permits(ranks) is (uneven == "pad" or units % ranks == 0)
    if not rule.permits(ranks):
        return
    shape = (units * width, 3) if axis == OUT else (3, units * width)
    together = torch.cat(parts(numbered(*shape), rule, ranks), dim=axis)
    whole, padding = together.split([units * width, together.shape[axis] - units * width], dim=axis)
    assert torch.equal(whole, numbered(*shape))
    assert bool((padding == -1).all())
    assert rule.padded(ranks) * width == together.shape[axis]


@given(count=st.integers(1, 12), group=st.integers(1, 8), ranks=st.integers(1, 96))
def test_a_rank_has_the_key_value_heads_of_its_query_heads(count: int, group: int, ranks: int) -> None:
    """Query head q reads key-value head q // group of the model; on a rank, of its own."""
    queries, rule = Split(OUT, "num_attention_heads", count * group), kv_heads(count)
    if not queries.permits(ranks) or not rule.permits(ranks):
        return
    heads = torch.arange(count)[:, None]
    for rank in range(ranks):
        query, held = shard(torch.arange(count * group), queries, rank, ranks), shard(heads, rule, rank, ranks)
        local_group = len(query) // len(held)
        assert [int(held[i // local_group]) for i in range(len(query))] == (query // group).tolist()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_every_stored_type_can_be_padded(dtype: torch.dtype) -> None:
    rule = Split(OUT, "size", 3, "pad", filling=1.0)
    last = parts(torch.full((3, 2), 2.0).to(dtype), rule, 2)[1]
    assert last.dtype == dtype and last.float().tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_what_is_not_divided() -> None:
    bias = numbered(4)
    assert all(torch.equal(part, bias) for part in parts(bias, REPLICATED, 3))
    assert torch.equal(torch.stack(parts(bias, ADDED_ONCE, 3)).sum(0), bias)


def test_a_rank_may_hold_padding_alone() -> None:
    assert [part.tolist() for part in parts(numbered(3), Split(OUT, "size", 3, "pad"), 5)] == [[1], [2], [3], [0], [0]]
