"""Prompts that go on from kept sequences: the same output and the same acceptance as without, and fewer passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.detokenizer import Detokenizer
from dflash_trt.runtime.kept import KeptSequences, Match
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import TINY
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import expected_output, request, run

PROMPTS = (TINY / "prompts.txt").read_text().splitlines()[:4]


def ended(scheduler: Scheduler, prompt: list[int], max_tokens: int) -> Request:
    one = request(prompt, max_tokens)
    scheduler.add([one])
    run(scheduler)
    return one


def test_a_next_turn_runs_only_what_is_new() -> None:
    executor = SimulatedExecutor(2)
    scheduler = Scheduler(executor, FixedWindow(4), reuse_prefixes=True)
    first = ended(scheduler, list(range(100, 120)), 10)
    assert scheduler.prefix_hits == 0 and scheduler.prefix_queries == 20
    executor.passes.clear()
    ended(scheduler, [*first.tokens, 50, 51], 1)
    assert scheduler.prefix_hits == first.kv_len and scheduler.prefix_queries == 20 + 32
    assert [each.q_len for each in executor.passes] == [[3]]


def test_the_same_prompt_runs_its_last_token() -> None:
    executor = SimulatedExecutor(2)
    scheduler = Scheduler(executor, FixedWindow(4), reuse_prefixes=True)
    ended(scheduler, list(range(100, 120)), 10)
    executor.passes.clear()
    ended(scheduler, list(range(100, 120)), 1)
    assert scheduler.prefix_hits == 19 and [each.q_len for each in executor.passes] == [[1]]


def test_the_least_recently_used_makes_room() -> None:
    scheduler = Scheduler(SimulatedExecutor(2), FixedWindow(4), reuse_prefixes=True)
    for start in (100, 200, 100, 300):
        ended(scheduler, list(range(start, start + 9)), 1)
    assert {tokens[0] for tokens in scheduler.kept.tokens.values()} == {100, 300}


def test_nothing_goes_while_there_is_room() -> None:
    """Whatever slot a prompt runs in and goes on in, as many are kept as there are slots."""
    scheduler = Scheduler(SimulatedExecutor(3), FixedWindow(4), reuse_prefixes=True)
    for count, start in enumerate((100, 200, 300), 1):
        ended(scheduler, list(range(start, start + 9)), 1 + count)
        assert len(scheduler.kept) == count


def test_nothing_is_kept_unless_asked() -> None:
    scheduler = Scheduler(SimulatedExecutor(2), FixedWindow(4))
    for _ in range(2):
        ended(scheduler, list(range(100, 120)), 10)
    assert len(scheduler.kept) == scheduler.prefix_hits == scheduler.prefix_queries == 0


TOKENS = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(TOKENS, max_size=5), TOKENS)
def test_the_longest_prefix_is_found(sequences: list[list[int]], prompt: list[int]) -> None:
    kept = KeptSequences()
    for slot, tokens in enumerate(sequences):
        kept.keep(slot, tokens)
    shared = [
        next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), min(len(tokens), len(prompt)))
        for tokens in sequences
    ]
    longest = max(shared, default=0)
    match = kept.match(prompt)
    if longest == 0:
        assert match is None
    else:
        slot = shared.index(longest)
        assert match == Match(slot, longest, longest == len(sequences[slot]))
        assert list(kept.tokens)[-1] == slot


def turns(llm: LLM, params: SamplingParams, *, reuse_prefixes: bool) -> tuple[list[Request], Scheduler]:
    """Four conversations of three turns, all of a turn together."""
    scheduler = Scheduler(llm.executor, FixedWindow(llm.executor.max_window), reuse_prefixes=reuse_prefixes)
    prompts = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    requests: list[Request] = []
    for _ in range(3):
        new = [
            Request(
                prompt,
                params,
                limit=llm.executor.max_seq_len,
                stop_token_ids=llm.engine.config.pretrained_config.eos_token_ids,
                detokenizer=Detokenizer(llm.tokenizer, ()),
                vocab_size=llm.engine.config.pretrained_config.vocab_size,
            )
            for prompt in prompts
        ]
        scheduler.add(new)
        run(scheduler)
        requests += new
        prompts = [[*one.tokens, *prompt[-9:]] for one, prompt in zip(new, prompts, strict=True)]
    return requests, scheduler


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_acceptance_are_the_same(
    llms: dict[str, LLM], temperature: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of the trained pair: what the drafter finds in kept caches is what it would have been given."""
    llm = llms["tiny"]
    monkeypatch.setattr(llm.executor, "max_batch_size", slots)
    monkeypatch.setattr(llm.executor, "max_num_tokens", 16)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    without, plain = turns(llm, params, reuse_prefixes=False)
    reused, scheduler = turns(llm, params, reuse_prefixes=True)
    assert [one.output for one in reused] == [one.output for one in without]
    assert [one.statistics for one in reused] == [one.statistics for one in without]
    assert scheduler.prefix_hits > 0
    assert scheduler.target_passes <= plain.target_passes
    if slots > len(PROMPTS):
        assert scheduler.prefix_hits > 0.5 * scheduler.prefix_queries
        assert scheduler.target_passes < plain.target_passes


def test_what_is_running_is_shared() -> None:
    """Several outputs of one prompt, and users with one system prompt, run it once."""
    executor = SimulatedExecutor(3, max_num_tokens=64)
    scheduler = Scheduler(executor, FixedWindow(1), reuse_prefixes=True)
    prompt = list(range(100, 120))
    several = [request([*prompt, 7 + index], 8, seed=index) for index in range(3)]
    scheduler.add(several)
    for _ in range(3):
        scheduler.step()
    prompts = [each.q_len for each in executor.passes if len(each.q_len) == 1 and each.slots != [0]]
    assert scheduler.prefix_hits == 40 and prompts == [[1], [1]]
    run(scheduler)
    assert [one.output for one in several] == [expected_output([*prompt, 7 + i], 8, seed=i) for i in range(3)]
