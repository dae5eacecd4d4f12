"""What an engine's config says of memory."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.torch_executor import TorchExecutor
from tests.conftest import Engines


@pytest.mark.parametrize("name", ["llama", "tiny", "FP8", "FP8 caches"])
def test_cache_bytes_are_what_the_executor_allocates(llms: Engines, name: str) -> None:
    executor = llms[name].executor
    assert isinstance(executor, TorchExecutor)
    layers = (*executor._caches.target, *executor._caches.drafter)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert llms[name].engine.config.cache_bytes == allocated
