"""The TensorRT executor over interpreted networks: what it decodes is what the torch executor decodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.tensorrt_executor import TensorRTExecutor
from tests.engine.recorded import Recorded, for_tensorrt, rank_pairs, shared_of
from tests.tiny_models import random_drafter, random_target

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [40, 41], [60], [30, 31, 32], [9]]


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama by plugins"])
def llms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    """One engine twice: by the torch executor, and by the TensorRT executor over its networks."""
    root: Path = tmp_path_factory.mktemp("executor")
    family, plugins = request.param.split()[0], request.param.endswith("plugins")
    target = random_target(root / "target", family, num_hidden_layers=2)
    random_drafter(root / "drafter", target, num_hidden_layers=1, target_layer_ids=(0, 1))
    config, pairs = rank_pairs(root / "target", root / "drafter", root / "engine", max_batch_size=4 if plugins else 2)
    expected, actual = (LLM(root / "engine", device="cpu") for _ in range(2))
    actual.executor = TensorRTExecutor(
        for_tensorrt(config, plugins=plugins),
        Recorded(record_target, config, pairs, plugins=plugins),
        Recorded(record_drafter, config, pairs, plugins=plugins),
        shared_of(config, pairs[0]),
    )
    return expected, actual


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, seed=1),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.2, seed=2, top_k=20, repetition_penalty=1.1),
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_decodes_as_the_torch_executor(llms: tuple[LLM, LLM], params: SamplingParams) -> None:
    """Five prompts in fewer slots, one of two chunks, so that slots move and are taken again, and passes are padded."""
    expected, actual = ([each.outputs[0] for each in llm.generate(PROMPTS, params)] for llm in llms)
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert [each.statistics for each in actual] == [each.statistics for each in expected]


def test_a_drafter_that_overflows_costs_guesses_only(llms: tuple[LLM, LLM]) -> None:
    """It chooses no token, which the target must not be given."""
    expected, actual = llms
    executor = actual.executor
    assert isinstance(executor, TensorRTExecutor)
    run, params = executor._run_drafter, SamplingParams(max_tokens=9, ignore_eos=True)

    def overflowing(profile: str, tensors: Mapping[str, Tensor]) -> None:
        run(profile, tensors)
        tensors["logits"].fill_(float("inf"))
        if "drafts" in tensors:
            tensors["drafts"].fill_(-1)

    executor._run_drafter = overflowing
    try:
        tokens = [each.outputs[0].token_ids for each in actual.generate(PROMPTS, params)]
    finally:
        executor._run_drafter = run
    assert tokens == [each.outputs[0].token_ids for each in expected.generate(PROMPTS, params)]
