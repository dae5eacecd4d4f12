"""Operations as TensorRT's own layers, interpreted, where models as a whole do not show it."""

from __future__ import annotations

import pytest
import tensorrt_rtx as trt
import torch

from dflash_trt.ops.base import LayerCache
from dflash_trt.ops.tensorrt_ops import NetworkSpan, TensorRTOps
from tests.network_bench import Bench


@pytest.mark.parametrize("where_bad", ["keys", "values"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_head_that_is_not_finite_is_cached_as_the_plugin_caches_it(
    dtype: torch.dtype, bad: float, where_bad: str
) -> None:
    bench = Bench()
    ops = TensorRTOps(trt, bench.network)
    caches = [torch.zeros(2, 2, 6, 4, dtype=dtype) for _ in range(2)]
    rows = {name: torch.randn(2, 2, 3, 4).to(dtype) for name in ("keys", "values")}
    sound = [part.clone() for part in rows.values()]
    rows[where_bad][1, 0, 2, 3] = bad
    kv_len, q_len = (bench.input(torch.tensor(each, dtype=torch.int32)) for each in ([1, 2], [3, 3]))
    span = NetworkSpan(None, None, 6, kv_len=kv_len, q_len=q_len)
    cache = LayerCache(*(bench.input(each) for each in caches))
    ops.kv_cache_update(cache, *(bench.input(part) for part in rows.values()), span)
    keys, values = bench.outputs()
    for sequence, start in enumerate((1, 2)):
        for cached, part, marked in zip((keys, values), sound, (torch.nan, 0.0), strict=True):
            expected = part[sequence].clone()
            if sequence == 1:
                expected[0, 2] = marked
            torch.testing.assert_close(cached[sequence, :, start : start + 3], expected, rtol=0, atol=0, equal_nan=True)
