"""An engine of several ranks decodes the tokens of one rank, in float64."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.directory import Engine
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.structured import StructuredOutputs
from tests.conftest import QUANTIZED, TINY, Engines
from tests.models.test_dflash import as_speculators
from tests.runtime.rank_threads import parallel_executor
from tests.runtime.test_exactness import random_case, tokens_of
from tests.tiny_models import random_drafter, random_target


def with_ranks(llms: Engines, name: str, ranks: int, directory: Path) -> Engine:
    """The engine of that name, built once more."""
    checkpoints = TINY if name == "tiny" else llms[name].engine.path.parent
    config = replace(llms[name].engine.config.build_config, tp_size=ranks)
    return build_engine(
        open_target(checkpoints / "target"), open_drafter(checkpoints / "drafter"), config, directory / "engine"
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "tiny", *QUANTIZED])
def test_ranks_change_no_token(
    llms: Engines, tmp_path: Path, name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, filtered and penalized, with speculation and without, together and alone."""
    llm = llms[name]
    rng = random.Random(f"{name} {ranks}")
    vocab_size = llm.engine.config.pretrained_config.vocab_size
    prompts, params = map(list, zip(*(random_case(rng, vocab_size) for _ in range(6)), strict=True))
    params = [replace(each, max_tokens=min(each.max_tokens or 1, 12)) for each in params]
    plain = [SamplingParams(max_tokens=8, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate((0, 1, 1, 0))]
    block_size = llm.executor.max_window
    expected, expected_plain = tokens_of(llm, prompts, params, 1), tokens_of(llm, prompts[:4], plain, 1)
    with parallel_executor(with_ranks(llms, name, ranks, tmp_path)) as executor:
        monkeypatch.setattr(llm, "executor", executor)
        for window in (1, block_size):
            assert tokens_of(llm, prompts, params, window) == expected
            assert tokens_of(llm, prompts[:4], plain, window) == expected_plain
        assert tokens_of(llm, prompts[:1], params[:1], block_size) == expected[:1]


def test_a_drafter_with_its_own_head(tmp_path: Path, llms: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_target(tmp_path / "target")
    random_drafter(tmp_path / "own", target)
    as_speculators(tmp_path / "own", tmp_path / "drafter", list(range(0, 97, 2)), torch.randn(49, 48))
    llm = llms["llama"]
    checkpoints = open_target(tmp_path / "target"), open_drafter(tmp_path / "drafter")
    params = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=12, temperature=1.0, seed=3)]
    outputs = []
    for ranks in (1, 2):
        config = replace(llm.engine.config.build_config, tp_size=ranks)
        with parallel_executor(build_engine(*checkpoints, config, tmp_path / str(ranks))) as executor:
            monkeypatch.setattr(llm, "executor", executor)
            stream = llm.generate([[5, 6, 7], [8]], params, verify_window=llm.executor.max_window)
            outputs.append(([o.outputs[0].token_ids for o in stream], stream.statistics))
    assert outputs[0] == outputs[1], "guesses are the same too, or other counts of them would be accepted"


def test_slots_move_on_every_rank(llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llms["tiny"]
    rng = random.Random(5)
    prompts, params = map(list, zip(*(random_case(rng, 500) for _ in range(6)), strict=True))
    expected = tokens_of(llm, prompts, params, 1)
    with parallel_executor(with_ranks(llms, "tiny", 2, tmp_path)) as executor:
        monkeypatch.setattr(executor, "max_batch_size", 3)
        monkeypatch.setattr(llm, "executor", executor)
        assert tokens_of(llm, prompts, params, executor.max_window) == expected


def test_a_rank_never_sends_whole_rows_unless_they_are_needed(
    llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms["tiny"]
    engine = with_ranks(llms, "tiny", 2, tmp_path)
    sizes: list[int] = []
    with parallel_executor(engine) as executor:
        monkeypatch.setattr(llm, "executor", executor)
        group = executor._executor.verifier.model.ranks.group

        class Counted:
            def _allgather_base(self, gathered: torch.Tensor, x: torch.Tensor) -> object:
                sizes.append(len(x))
                return group._allgather_base(gathered, x)

            def broadcast(self, x: torch.Tensor, root: int) -> object:
                return group.broadcast(x, root)

        object.__setattr__(executor._executor.verifier.model.ranks, "group", Counted())
        row = 697 // 2 * 8
        plain = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True)
        llm.generate([[5]], plain, verify_window=1)
        assert max(sizes) < row
        llm.generate([[5]], replace(plain, top_p=0.9), verify_window=1)
        assert max(sizes) > row


def test_what_one_rank_cannot_represent_is_refused_by_all_and_the_next_call_works(
    llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms["llama"]
    with parallel_executor(with_ranks(llms, "llama", 2, tmp_path)) as executor:
        monkeypatch.setattr(llm, "executor", executor)
        head = executor._executor.verifier.model.pair.target_weights.head.weight
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        expected = tokens_of(llm, [[5, 6]], [params], 1)
        kept = head[3, 0].item()
        head[3, 0] = float("nan")
        (bad,) = llm.generate([[5, 6]], params)[0].outputs
        assert "not finite in float64: weights are damaged or scales wrong" in (bad.error or "")
        head[3, 0] = kept
        assert tokens_of(llm, [[5, 6]], [params], 1) == expected


@pytest.mark.parametrize("window", [1, 8])
def test_edits_and_logprobs_are_those_of_one_rank(
    llms: Engines, tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which only rank 0 has: all together in one batch, greedy and sampled."""
    llm = llms["tiny"]
    forms = [
        StructuredOutputs(regex="[a-f]{9,12}"),
        StructuredOutputs(
            json={
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        None,
    ]
    params = [
        SamplingParams(
            max_tokens=60,
            temperature=temperature,
            seed=4,
            structured_outputs=form,
            logit_bias={token: (-1) ** token * 7.0 for token in range(40, 90)},
            min_tokens=6,
            logprobs=3,
        )
        for form in forms
        for temperature in (0.0, 1.2)
    ]
    prompts = ["Once upon a time"] * len(params)
    one = [output.outputs[0] for output in llm.generate(prompts, params, verify_window=1)]
    with parallel_executor(with_ranks(llms, "tiny", 2, tmp_path)) as executor:
        monkeypatch.setattr(llm, "executor", executor)
        two = [output.outputs[0] for output in llm.generate(prompts, params, verify_window=window)]
    for expected, found in zip(one, two, strict=True):
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        for ours, theirs in zip(expected.logprobs or (), found.logprobs or (), strict=True):
            assert [token for token, _ in theirs.top] == [token for token, _ in ours.top]
            values = [theirs.logprob, *(value for _, value in theirs.top)]
            assert values == pytest.approx([ours.logprob, *(value for _, value in ours.top)], abs=1e-9)
    assert all(re.fullmatch("[a-f]{9,12}", each.text) for each in two[:2])
    assert all(isinstance(json.loads(each.text)["a"], bool) for each in two[2:4])
