"""A sequence whose values are not finite ends in an error alone: its neighbours, and what comes after, are exact.

A draft token whose values are not finite ends nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_trt.models.pair import Pair
from dflash_trt.ops.base import Ops
from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import Engines, build_pair

POISON, HARMLESS = 9, 10
NEITHER = {POISON: -100.0, HARMLESS: -100.0}
PROMPTS = [[5, 6, 7], [50, 51], [20] * 20]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=NEITHER),
    SamplingParams(max_tokens=20, temperature=1.0, seed=2, ignore_eos=True, logit_bias=NEITHER),
    SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True, logit_bias=NEITHER),
]


@pytest.fixture(params=[float("inf"), float("nan")])
def llm(llms: Engines, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The random pair, one of whose tokens has an embedding that is none."""
    llm = llms["llama"]
    embedding = llm.executor.verifier.model.pair.target_weights.embedding  # type: ignore[attr-defined]
    sound = embedding[POISON].clone()
    embedding[POISON] = request.param
    yield llm
    embedding[POISON] = sound


def poisoned(llm: LLM, kind: str) -> tuple[list[int], SamplingParams]:
    """A prompt with that token in its first chunk or its last, or one that the token follows."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    chunk = llm.executor.max_num_tokens
    return {
        "prompt": ([3, POISON, 4], params),
        "first chunk": ([POISON] + [3] * chunk, params),
        "last chunk": ([3] * chunk + [POISON], params),
        "output": ([3, 4], replace(params, logit_bias={POISON: 100.0})),
    }[kind]


@pytest.mark.parametrize("kind", ["prompt", "first chunk", "last chunk", "output"])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("reuse_prefixes", [False, True])
def test_it_ends_alone(llm: LLM, kind: str, window: int, reuse_prefixes: bool) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, verify_window=1)]
    scheduler = Scheduler(llm.executor, FixedWindow(window), max_batch_size=3, reuse_prefixes=reuse_prefixes)
    for _ in range(2):  # the second time in slots that held what was not finite
        neighbours = [made(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        bad = made(llm, *poisoned(llm, kind))
        scheduler.add([neighbours[0], bad, *neighbours[1:]])
        while not scheduler.idle:
            scheduler.step()
        assert bad.finish_reason == "error" and bad.error is not None
        assert "not finite in float64" in bad.error and "\n" not in bad.error
        assert bad.output == ([POISON] if kind == "output" else [])
        assert [one.output for one in neighbours] == expected
        assert all(POISON not in tokens for tokens in scheduler.kept.tokens.values())


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("kind", ["prompt", "first chunk", "output"])
def test_other_outputs_of_a_call_are_kept(llm: LLM, kind: str, window: int) -> None:
    expected = llm.generate(PROMPTS, PARAMS, verify_window=1)
    prompt, params = poisoned(llm, kind)
    bad, *others = llm.generate([prompt, *PROMPTS], [params, *PARAMS], verify_window=window)
    assert bad.outputs[0].finish_reason == "error" and "not finite in float64" in bad.outputs[0].error
    for one, alone in zip(others, expected, strict=True):
        assert one.outputs[0].error is None and one.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_logits_that_decide_nothing_end_nothing(llms: Engines, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's token whose logits alone are not finite, at the end of a chunk or inside of one."""
    llm = llms["qwen3"]
    pair = type(llm.executor.verifier.model.pair)  # type: ignore[attr-defined]
    target_pass = pair.target_pass

    def overflowing(self: Pair, ops: Ops, tokens: Tensor, rows: Tensor, *where: Any) -> Tensor:
        logits: Tensor = target_pass(self, ops, tokens, rows, *where)
        return logits.masked_fill((tokens.gather(1, rows) == POISON)[..., None], float("inf"))

    prompt = [5, 6, POISON, 8, 9, 10, 11]
    expected = llm.generate([prompt], PARAMS[:1], verify_window=1)[0].outputs[0].token_ids
    monkeypatch.setattr(pair, "target_pass", overflowing)
    monkeypatch.setattr(llm.executor, "max_num_tokens", chunk)
    assert llm.generate([prompt], PARAMS[:1], verify_window=1)[0].outputs[0].token_ids == expected


class BadGuesses:
    """An executor some of whose drafts have one token, wherever it is asked for guesses."""

    def __init__(self, executor: Executor, token: int) -> None:
        self._executor = executor
        self._token = token
        self._random = random.Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def propose(self, sequences: Sequences, count: int) -> Proposal:
        proposal = self._executor.propose(sequences, count)
        there = torch.tensor([[self._random.random() < 0.4 for _ in row] for row in proposal.tokens])
        return Proposal(proposal.tokens.masked_fill(there, self._token), proposal.draft_len)


def outputs(llm: LLM, window: int) -> list[list[int]]:
    """Of the prompts, the first of which does not speculate, twice in slots that are used again."""
    found = []
    scheduler = Scheduler(llm.executor, FixedWindow(window), max_batch_size=3, reuse_prefixes=True)
    for _ in range(2):
        requests = [made(llm, *one) for one in zip(PROMPTS, PARAMS, strict=True)]
        requests[0].verify_window = 1
        scheduler.add(requests)
        while not scheduler.idle:
            scheduler.step()
        assert [one.error for one in requests] == [None] * 3
        found += [one.output for one in requests]
    return found


@pytest.mark.parametrize("window", [2, 4])
def test_a_draft_token_ends_nothing(llm: LLM, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, verify_window=1)]
    monkeypatch.setattr(llm, "executor", BadGuesses(llm.executor, POISON))
    assert outputs(llm, window) == 2 * expected


@pytest.mark.parametrize("module", ["k", "v"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_draft_token_that_overflows_ends_nothing(
    llms: Engines, dtype: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: passes of one shape, with a token that overflows among guesses or one that does not."""
    llms["llama"]
    root = llms.root / "llama"
    llm = build_pair(tmp_path / "engine", root / "target", root / "drafter", dtype=dtype)
    weights = llm.executor.verifier.model.pair.target_weights  # type: ignore[attr-defined]
    embedding, layer = weights.embedding, weights.layers[0]
    # Only that token has anything in the first dimension, of which its keys or values are too large.
    embedding[:, 0] = 0
    embedding[POISON] = 0
    embedding[POISON, 0] = 1
    getattr(layer, module).weight[:, 0] = torch.finfo(embedding.dtype).max / 4
    executor = llm.executor
    found = []
    for token in (POISON, HARMLESS):
        monkeypatch.setattr(llm, "executor", BadGuesses(executor, token))
        found.append(outputs(llm, 4))
    assert found[0] == found[1]
    monkeypatch.setattr(llm, "executor", executor)
    assert llm.generate([[5, POISON, 6]], PARAMS[:1])[0].outputs[0].finish_reason == "error"


def made(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    return llm.new_request(prompt, params.each()[0], where="here")
