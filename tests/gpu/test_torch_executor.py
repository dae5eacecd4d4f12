"""The torch executor on CUDA against itself on the CPU, token for token, in float64."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dflash_trt.runtime.llm import LLM
from tests.conftest import Engines
from tests.runtime.test_exactness import random_case, tokens_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.mark.parametrize("name", ["llama", "qwen3", "tiny"])
def test_tokens_equal_those_of_the_cpu(llms: Engines, name: str) -> None:
    cpu = llms[name]
    engine: Path = cpu.engine.path
    gpu = LLM(engine, device="cuda")
    rng = random.Random(name)
    prompts, params = map(list, zip(*(random_case(rng, 97) for _ in range(8)), strict=True))
    expected = tokens_of(cpu, prompts, params, 1)
    for window in range(1, gpu.executor.max_window + 1):
        assert tokens_of(gpu, prompts, params, window) == expected
