"""Prompt lookup: what it proposes, and that its proposals change no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.load import load_executor
from dflash_trt.runtime.ngram import LONGEST, SHORTEST, NgramProposer
from dflash_trt.runtime.proposer import Proposal, Sequences
from dflash_trt.runtime.sampling import Sampling, SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import Engines
from tests.runtime.rank_threads import executor_of
from tests.runtime.test_exactness import random_case, tokens_of
from tests.runtime.test_tensor_parallelism import with_ranks

REPEATED = "the quick brown fox jumps over the lazy dog and the quick brown fox"


def propose(proposer: NgramProposer, *tokens: list[int], count: int = 4) -> Proposal:
    ends = torch.tensor([len(each) for each in tokens])
    sampling = Sampling.of([SamplingParams(seed=0)] * len(tokens), [()] * len(tokens))
    anchors = torch.tensor([each[-1] for each in tokens])
    return proposer.propose(Sequences(anchors, ends - 1, torch.arange(len(tokens)), sampling, tokens), count)


def drafts(proposal: Proposal) -> list[list[int]]:
    return [row[:length] for row, length in zip(proposal.tokens.tolist(), proposal.draft_len.tolist(), strict=True)]


def looked_up(tokens: list[int], count: int) -> list[int]:
    """By looking at every place, from the last one back."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                found = list(tokens)
                for _ in range(count):
                    found.append(found[end + len(found) - len(tokens)])
                return found[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7), st.integers(0, 10))
def test_proposes_what_followed_the_latest_longest_match(tokens: list[int], count: int, grown: int) -> None:
    """Also of a sequence that grows between one step and the next."""
    proposer, sequence = NgramProposer(7), tokens[: max(1, len(tokens) - grown)]
    for token in (*tokens[len(sequence) :], None):
        assert drafts(propose(proposer, sequence, count=count)) == [looked_up(sequence, count)]
        if token is not None:
            sequence.append(token)


def test_sequences_of_a_batch_are_looked_up_apart() -> None:
    proposal = propose(NgramProposer(7), [1, 2, 3, 1, 2], [5, 6, 7, 8], [9, 9, 9])
    assert drafts(proposal) == [[3, 1, 2, 3], [], [9, 9, 9, 9]]
    assert proposal.tokens.shape == (3, 4)


def test_a_slot_that_another_sequence_takes_is_looked_up_anew() -> None:
    proposer = NgramProposer(7)
    propose(proposer, [1, 2, 3, 1, 2], [4, 5, 6, 4, 5])
    proposer.move_slot(1, 0, 5)
    assert drafts(propose(proposer, [1, 2, 8, 1, 2])) == [[8, 1, 2, 8]]


@pytest.fixture(scope="module")
def ngram(llms: Engines) -> Iterator[LLM]:
    with LLM(llms["tiny"].engine.path, device="cpu", proposer="ngram") as llm:
        yield llm


def test_no_context_is_written_for_the_drafter(ngram: LLM) -> None:
    assert ngram.executor.verifier.caches.drafter is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [2, 5, 8, None])
def test_changes_no_token(llms: Engines, ngram: LLM, window: int | None) -> None:
    rng = random.Random(f"{window}")
    cases = [random_case(rng, 500) for _ in range(6)]
    prompts = [(prompt * 3)[:60] for prompt, _ in cases]
    params = [each for _, each in cases]
    expected = tokens_of(llms["tiny"], prompts, params, 1)
    generation = ngram.generate(prompts, params, verify_window=window)
    assert [each.outputs[0].token_ids for each in generation] == expected
    assert generation.statistics.draft_tokens > 0


def test_text_that_repeats_itself_is_accepted(llms: Engines, ngram: LLM) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    [prompt] = [llms["tiny"].tokenizer.encode(f"{REPEATED} {REPEATED} {REPEATED}")]
    plain = llms["tiny"].generate([prompt], params, verify_window=1)
    found = ngram.generate([prompt], params, verify_window=8)
    assert found[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    assert found.statistics.accepted_tokens > 8
    assert found.target_passes < plain.target_passes


def test_structured_output(llms: Engines, ngram: LLM) -> None:
    """Proposals that the grammar does not allow are rejected like any other."""
    form = StructuredOutputs(regex="(ab|ba){4,12}")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, structured_outputs=form)
    expected = tokens_of(llms["tiny"], [[40, 41]], [params], 1)
    assert tokens_of(ngram, [[40, 41]], [params], 8) == expected


def test_prefixes_are_reused(ngram: LLM) -> None:
    scheduler = Scheduler(ngram.executor, FixedWindow(8), reuse_prefixes=True)
    params = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)

    def output(prompt: list[int]) -> list[int]:
        [one] = [ngram.new_request(prompt, each, where="prompt") for each in params.each()]
        scheduler.add([one])
        while not scheduler.idle:
            scheduler.step()
        return one.output

    first = [40, 41, 42, 40, 41, 42, 40]
    again = [*first, *output(first), 43]
    hits = scheduler.prefix_hits
    assert output(again) == ngram.generate([again], params, verify_window=1)[0].outputs[0].token_ids
    assert scheduler.prefix_hits > hits


def test_of_two_ranks_one_proposes(llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = llms["tiny"], [[40, 41, 42] * 5, [7, 8] * 9]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=seed, temperature=0.7) for seed in (0, 1)]
    expected = tokens_of(llm, prompts, params, 1)
    engine = with_ranks(llms, "tiny", 2, tmp_path)
    with executor_of(2, lambda ranks: load_executor(engine, torch.device("cpu"), ranks, "ngram")) as executor:
        monkeypatch.setattr(llm, "executor", executor)
        generation = llm.generate(prompts, params, verify_window=8)
    assert [each.outputs[0].token_ids for each in generation] == expected
    assert generation.statistics.draft_tokens > 0
