"""Rotation and the way into a cache on CPUs, against torch."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.ops.base import LayerCache, RotaryTable
from dflash_trt.ops.cpu.rotary import rotary_embedding, write_cache
from dflash_trt.ops.torch_ops import TorchOps
from tests.models.eager import span

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40, 64])
def test_rotation(dtype: torch.dtype, size: int) -> None:
    angles = 6 * torch.rand(30, size // 2)
    table = RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))
    x, where = torch.randn(2, 5, 3, size).to(dtype).transpose(1, 2), span([0, 20], 5)
    wide, ops = RotaryTable(table.cos.double(), table.sin.double()), TorchOps()
    expected = ops.rotary_embedding(x.double(), ops.rotary_rows(wide, where)).to(dtype)
    rows = RotaryTable(table.cos[where.positions], table.sin[where.positions])
    actual = rotary_embedding(x, rows)
    torch.testing.assert_close(actual, expected)
    alone = RotaryTable(rows.cos[1:, 3:4].contiguous(), rows.sin[1:, 3:4].contiguous())
    assert torch.equal(rotary_embedding(x[1:, :, 3:4], alone)[0, :, 0], actual[1, :, 3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40, 64])
def test_writing_a_cache(dtype: torch.dtype, size: int) -> None:
    before = torch.randn(3, 2, 20, size).to(dtype)
    cache = LayerCache(before.clone(), before.clone())
    keys, values = (torch.randn(2, 5, 2, size).to(dtype).transpose(1, 2) for _ in range(2))
    keys[1, 0, 2, 3], values[0, 1, 4, 5] = float("inf"), float("nan")
    write_cache(cache, keys, values, span([4, 9], 5, [2, 0]))
    expected_keys, expected_values = before.clone(), before.clone()
    for slot, start, sequence in ((2, 4, 0), (0, 9, 1)):
        expected_keys[slot, :, start : start + 5] = keys[sequence]
        expected_values[slot, :, start : start + 5] = values[sequence]
    for slot, head, position in ((0, 0, 11), (2, 1, 8)):  # where a number is not finite
        expected_keys[slot, head, position] = float("nan")
        expected_values[slot, head, position] = 0
    torch.testing.assert_close(cache.keys, expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, expected_values, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40, 64])
def test_writing_a_cache_of_fp8(dtype: torch.dtype, size: int) -> None:
    keys, values = (100 * torch.randn(2, 3, 5, size).to(dtype).transpose(1, 2) for _ in range(2))
    keys[1, 0, 2, 3], values[0, 1, 2, 5] = float("inf"), float("nan")
    keys[0, 0, 0, :4] = torch.tensor([0.0, -0.0, 1e4, -1e4])
    where = span([4, 9], 3, [2, 0])
    shape, scales = (3, 5, 20, size), (torch.tensor(0.31), torch.tensor(0.017))
    caches = [LayerCache(*(torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in range(2)), *scales) for _ in range(2)]
    write_cache(caches[0], keys, values, where)
    TorchOps().kv_cache_update(caches[1], keys, values, where)
    for part in ("keys", "values"):
        actual, expected = (getattr(cache, part) for cache in caches)
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    codes = caches[0].keys[2, 0, 4, :4].view(torch.uint8).tolist()
    assert codes == [0x00, 0x80, 0x7E, 0xFE]
