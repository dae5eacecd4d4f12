"""The TensorRT executor over interpreted networks: what it decodes is what the torch executor decodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Barrier

import pytest
from torch import Tensor

from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.ops.ranks import Ranks
from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.parallel_executor import ParallelExecutor
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.tensorrt_executor import EnginePass, TensorRTDFlash, tensorrt_executor
from tests.engine.recorded import Recorded, for_tensorrt, interpret, rank_pairs, shared_of
from tests.models.test_dflash import as_speculators
from tests.runtime.rank_threads import executor_of
from tests.tiny_models import random_drafter, random_target

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [40, 41], [60], [30, 31, 32], [9]]


class Together:
    """One engine of every rank: each rank runs its own in a thread of its own, and the last to come evaluates all."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._recorded = recorded
        self._bound: dict[int, Mapping[str, Tensor]] = {}
        self._barrier = Barrier(len(recorded), self._interpret)

    def of_rank(self, rank: int) -> EnginePass:
        def run(profile: str, tensors: Mapping[str, Tensor]) -> None:
            self._bound[rank] = tensors
            self._barrier.wait(timeout=60)

        return run

    def _interpret(self) -> None:
        interpret(self._recorded, [self._bound[rank] for rank in range(len(self._recorded))])


@pytest.fixture(
    scope="module",
    params=[
        "llama native 1",
        "qwen3 native 1",
        "llama native 2",
        "llama plugins 1",
        "llama plugins 2",
        "own-head native 2",
        "own-head plugins 2",
    ],
)
def llms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """One pair twice: by the torch executor of one rank, and by TensorRT executors of all over their networks."""
    root: Path = tmp_path_factory.mktemp("executor")
    name, lowering, ranks = request.param.split()
    plugins, size = lowering == "plugins", int(ranks)
    target = random_target(root / "target", "qwen3" if name == "qwen3" else "llama", num_hidden_layers=2)
    random_drafter(root / "drafter", target, num_hidden_layers=1, target_layer_ids=(0, 1))
    if name == "own-head":
        (root / "drafter").rename(root / "full")
        as_speculators(root / "full", root / "drafter", list(range(0, 97, 2)), target.lm_head.weight[::2].clone())
    slots = 4 if plugins else 2
    rank_pairs(root / "target", root / "drafter", root / "one", max_batch_size=slots)
    config, pairs = rank_pairs(root / "target", root / "drafter", root / "all", max_batch_size=slots, tp_size=size)
    config = for_tensorrt(config, plugins=plugins)
    targets, drafters = (
        Together([Recorded(record, config, pairs, rank, plugins=plugins) for rank in range(size)])
        for record in (record_target, record_drafter)
    )

    def load(ranks: Ranks) -> RankExecutor:
        passes = targets.of_rank(ranks.rank), drafters.of_rank(ranks.rank)
        return tensorrt_executor(config, *passes, shared_of(config, pairs[ranks.rank]), ranks=ranks)

    expected, actual = (LLM(root / "one", device="cpu") for _ in range(2))
    with executor_of(size, load) as executor:
        actual.executor = executor
        yield expected, actual


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
    expected, actual = (
        [each.outputs[0] for each in llm.generate(PROMPTS, params, verify_window=llm.executor.max_window)]
        for llm in llms
    )
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]
    assert [each.statistics for each in actual] == [each.statistics for each in expected]


def test_a_drafter_that_overflows_costs_guesses_only(llms: tuple[LLM, LLM]) -> None:
    """It chooses no token, which the target must not be given."""
    expected, actual = llms
    assert isinstance(actual.executor, ParallelExecutor)
    proposer = actual.executor._executor.proposer
    assert isinstance(proposer, TensorRTDFlash)
    engine = proposer._engine
    run, params = engine._run, SamplingParams(max_tokens=9, ignore_eos=True)

    def overflowing(profile: str, tensors: Mapping[str, Tensor]) -> None:
        run(profile, tensors)
        tensors["logits"].fill_(float("inf"))
        if "drafts" in tensors:
            tensors["drafts"].fill_(-1)

    engine._run = overflowing
    try:
        tokens = [each.outputs[0].token_ids for each in actual.generate(PROMPTS, params)]
    finally:
        engine._run = run
    assert tokens == [each.outputs[0].token_ids for each in expected.generate(PROMPTS, params)]
