"""Output is a function of prompt, parameters and seed: never of drafter, window, batch or speculation.

In float64, where rounding cannot turn one token into another, and in float32 and BF16, where a row's bits on a CPU do
not depend on other rows.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import QUANTIZED
from tests.runtime.scripted_drafter import ScriptedDrafter

NAMES = st.sampled_from(["Clara", "Bruno", "Priya", "Farid"])
CASES_PER_BATCH = 8
NARROW = ["tiny float32", "tiny bfloat16"]
BATCHES = [(name, batch) for name in ("llama", "qwen3", "tiny") for batch in range(3)] + [
    (name, 0) for name in (*QUANTIZED, *NARROW)
]
"""With 3 drafters and 8 cases a batch: 216 cases of 3 unquantized targets, 72 of 3 quantized ones, 48 in two types."""


def random_case(rng: random.Random, vocab_size: int) -> tuple[list[int], SamplingParams]:
    """A prompt of 1..40 tokens and parameters, greedy in one case of three."""
    prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 40))]
    penalized = rng.random() < 0.3
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, 32),
        temperature=rng.choice([0.0, 0.6, 1.3]),
        top_k=rng.choice([0, 0, 1, 5, 20]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.2, 0.8]) if penalized else 1.0,
        presence_penalty=rng.choice([0.0, 0.7]) if penalized else 0.0,
        frequency_penalty=rng.choice([0.0, -0.4]) if penalized else 0.0,
        seed=rng.randrange(2**63),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 1]),
        logit_bias={rng.randrange(vocab_size): rng.uniform(-100, 8) for _ in range(20)} if rng.random() < 0.3 else None,
        logprobs=rng.choice([None, 0, 3]),
    )


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], window: int) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, verify_window=window)]


@pytest.mark.parametrize("drafter", ["own", "half-good", "perfect"])
@pytest.mark.parametrize(("name", "batch"), BATCHES)
def test_speculation_changes_no_token(
    llms: dict[str, LLM], name: str, drafter: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llms[name]
    vocab_size = llm.engine.config.pretrained_config.vocab_size
    rng = random.Random(f"{name} {drafter} {batch}")
    prompts, params = map(list, zip(*(random_case(rng, vocab_size) for _ in range(CASES_PER_BATCH)), strict=True))
    expected = [tokens_of(llm, [p], [q], 1)[0] for p, q in zip(prompts, params, strict=True)]
    if drafter != "own":
        known = [prompt + output for prompt, output in zip(prompts, expected, strict=True)]
        error_rate = 0.5 if drafter == "half-good" else 0.0
        monkeypatch.setattr(llm, "executor", ScriptedDrafter(llm.executor, known, vocab_size, error_rate))

    block = llm.executor.max_window
    for window in (3, block) if name in NARROW else range(1, block + 1):
        assert tokens_of(llm, prompts, params, window) == expected
        alone = [tokens_of(llm, [p], [q], window)[0] for p, q in zip(prompts, params, strict=True)]
        assert alone == expected


@pytest.mark.parametrize("max_batch_size", [1, 3])
def test_fewer_slots_than_prompts(llms: dict[str, LLM], max_batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait for a slot, and those whose slot moves when another one ends, get the same tokens."""
    llm = llms["tiny"]
    rng = random.Random(5)
    prompts, params = map(list, zip(*(random_case(rng, 500) for _ in range(10)), strict=True))
    expected = tokens_of(llm, prompts, params, 1)
    monkeypatch.setattr(llm.executor, "max_batch_size", max_batch_size)
    assert tokens_of(llm, prompts, params, llm.executor.max_window) == expected


@pytest.mark.parametrize("name", ["tiny", *QUANTIZED, *NARROW])
def test_chunks_of_the_prompt_change_no_token(llms: dict[str, LLM], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llms[name]
    vocab_size = llm.engine.config.pretrained_config.vocab_size
    prompt = [random.Random(1).randrange(3, vocab_size) for _ in range(61)]
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=1)]
    expected = tokens_of(llm, [prompt], params, llm.executor.max_window)
    for chunk in (1, 7, 60, 61):
        monkeypatch.setattr(llm.executor, "max_num_tokens", chunk)
        assert tokens_of(llm, [prompt], params, llm.executor.max_window) == expected


def test_seed_decides_sampled_outputs(llms: dict[str, LLM]) -> None:
    llm = llms["llama"]
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    first, again, other = (tokens_of(llm, [[5, 6, 7]], [p], 4)[0] for p in (params, params, replace(params, seed=8)))
    assert first == again
    assert first != other


@given(data=st.data())
@settings(max_examples=12)
def test_stop_texts_end_an_output_wherever_a_pass_emits_them(llms: dict[str, LLM], data: st.DataObject) -> None:
    """Several tokens of a pass may hold a stop text, or the first part of one; none after it is in the output."""
    llm = llms["tiny"]
    prompt = llm.encode_chat([{"role": "user", "content": f"Write the diary of {data.draw(NAMES)} the sailor."}])
    params = SamplingParams(max_tokens=32, temperature=data.draw(st.sampled_from([0.0, 0.9])), seed=1, ignore_eos=True)
    whole = llm.generate([prompt], params, verify_window=8)[0].outputs[0]
    starts = st.integers(0, len(whole.text) - 1)
    spans = data.draw(st.lists(st.tuples(starts, st.integers(1, 12)), min_size=1, max_size=3))
    stops = [whole.text[start : start + length] for start, length in spans]
    stops += data.draw(st.lists(st.text("ab. ", min_size=1, max_size=3), max_size=1))
    stopping = replace(params, stop=stops)
    alone, drafted = (llm.generate([prompt], stopping, verify_window=window)[0].outputs[0] for window in (1, 8))
    assert (drafted.text, drafted.token_ids, drafted.finish_reason) == (alone.text, alone.token_ids, "stop")
    assert alone.finish_reason == "stop"
    assert whole.text.startswith(drafted.text) and not any(stop in drafted.text for stop in stops)
    assert any(whole.text[len(drafted.text) :].startswith(stop) for stop in stops)
    assert drafted.token_ids == whole.token_ids[: len(drafted.token_ids)]
