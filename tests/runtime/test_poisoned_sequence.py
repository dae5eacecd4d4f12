"""A sequence whose values are not finite ends in an error alone: its neighbours, and what comes after, are exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import Engines

POISON = 9
PROMPTS = [[5, 6, 7], [50, 51], [20] * 20]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logit_bias={POISON: -100.0}),
    SamplingParams(max_tokens=20, temperature=1.0, seed=2, ignore_eos=True, logit_bias={POISON: -100.0}),
    SamplingParams(max_tokens=16, temperature=0.7, seed=3, ignore_eos=True, logit_bias={POISON: -100.0}),
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


def made(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    return llm.new_request(prompt, params.each()[0], where="here")
