"""How much of a draft is accepted, by how good the drafter is."""

from __future__ import annotations

import random

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import TINY
from tests.runtime.scripted_drafter import ScriptedDrafter

PROMPTS = (TINY / "prompts.txt").read_text().splitlines()


def distinct_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[i + 3, *(rng.randrange(3, 97) for _ in range(rng.randint(1, 20)))] for i in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama", "qwen3", "tiny"])
def test_perfect_drafter_reaches_the_block_size(
    llms: dict[str, LLM], name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms[name]
    block_size = llm.executor.max_window
    params = SamplingParams(max_tokens=1 + 5 * block_size, temperature=temperature, seed=1, ignore_eos=True)
    prompts = distinct_prompts(8)
    outputs = llm.generate(prompts, params, verify_window=1)
    known = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
    monkeypatch.setattr(llm, "executor", ScriptedDrafter(llm.executor, known, 97, error_rate=0.0))
    statistics = llm.generate(prompts, params, verify_window=llm.executor.max_window).statistics
    assert statistics.acceptance_length == block_size
    assert statistics.accepted_tokens == statistics.draft_tokens == 8 * 5 * (block_size - 1)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_random_drafter_is_accepted_about_never(llms: dict[str, LLM], name: str) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    llm = llms[name]
    statistics = llm.generate(distinct_prompts(8), params, verify_window=llm.executor.max_window).statistics
    assert 1.0 <= statistics.acceptance_length < 1.25


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_trained_drafter_at_every_batch_size(
    llms: dict[str, LLM], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded rows and neighbours cost no acceptance: it is the same to the last token, and above 2 at temperature 1."""
    llm = llms["tiny"]
    prompts = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS[:8]]
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=11)
    monkeypatch.setattr(llm.executor, "max_batch_size", batch_size)
    statistics = llm.generate(prompts, params, verify_window=llm.executor.max_window).statistics
    assert statistics.acceptance_length > 2
    monkeypatch.setattr(llm.executor, "max_batch_size", 1)
    alone = llm.generate(prompts, params, verify_window=llm.executor.max_window).statistics
    assert statistics == alone


def test_acceptance_without_speculation_is_one(llms: dict[str, LLM]) -> None:
    statistics = llms["llama"].generate([[5, 6]], SamplingParams(max_tokens=9), verify_window=1).statistics
    assert statistics.acceptance_length == 1.0
    assert statistics.draft_tokens == statistics.accepted_tokens == 0
