"""The torch backend against the contracts of verifier and proposer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_trt.runtime.executor import Executor
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.proposer import Sequences
from dflash_trt.runtime.sampling import Sampling, SamplingParams
from dflash_trt.runtime.verifier import Step, Verified
from tests.conftest import build_pair
from tests.tiny_models import random_drafter, random_target


def verify(
    executor: Executor, rows: list[list[int]], kv_len: list[int], slots: list[int], draft_len: list[int]
) -> Verified:
    width = max(map(len, rows))
    return executor.verify(
        Step(
            tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            q_len=torch.tensor([len(row) for row in rows]),
            draft_len=torch.tensor(draft_len),
            kv_len=torch.tensor(kv_len),
            slots=torch.tensor(slots),
            sampling=Sampling.of([SamplingParams(seed=0)] * len(rows), [()] * len(rows)),
        )
    )


def drafted(
    executor: Executor, anchors: Tensor, kv_len: Tensor, slots: Tensor, sampling: Sampling, count: int
) -> Tensor:
    proposal = executor.propose(Sequences(anchors, kv_len, slots, sampling, tokens=((),) * len(anchors)), count)
    assert proposal.draft_len.tolist() == [count] * len(anchors)
    return proposal.tokens


def greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return llm.generate([prompt], params, verify_window=1)[0].outputs[0].token_ids


def test_accepts_the_longest_right_prefix(llms: dict[str, LLM]) -> None:
    llm, prompt = llms["llama"], [5, 6, 7]
    right = greedy(llm, prompt, 5)
    for wrong_at in range(4):
        guesses = right[1:4]
        if wrong_at < 3:
            guesses[wrong_at] = (guesses[wrong_at] + 1) % 97
        verify(llm.executor, [prompt], [0], [0], [0])
        verified = verify(llm.executor, [[right[0], *guesses]], [3], [0], [3])
        assert verified.accepted.tolist() == [wrong_at]
        assert verified.next.tolist() == [right[1 + wrong_at]]


def test_ragged_steps_in_slots_out_of_order(llms: dict[str, LLM]) -> None:
    """Padding, neighbours and a gap between slots leave every row's result what it is alone."""
    llm = llms["llama"]
    prompts, slots = [[5, 6, 7], [9] * 11, [50]], [4, 1, 6]
    right = [greedy(llm, prompt, 5) for prompt in prompts]
    for prompt, slot in zip(prompts, slots, strict=True):
        verify(llm.executor, [prompt], [0], [slot], [0])
    steps = [right[0][:4], right[1][:1], right[2][:2]]
    lengths = [len(prompt) for prompt in prompts]
    for _ in range(2):  # again: a rejected or repeated pass leaves nothing behind
        verified = verify(llm.executor, steps, lengths, slots, [3, 0, 1])
        assert verified.accepted.tolist() == [3, 0, 1]
        assert verified.next.tolist() == [right[0][4], right[1][1], right[2][2]]


def test_a_prompt_chunk_and_a_verification_share_a_pass(llms: dict[str, LLM]) -> None:
    llm = llms["qwen3"]
    first, second = [5, 6, 7], [11, 12, 13, 14, 15, 16, 17]
    right = [greedy(llm, prompt, 3) for prompt in (first, second)]
    verify(llm.executor, [first], [0], [0], [0])
    verified = verify(llm.executor, [right[0][:2], second], [3, 0], [0, 1], [1, 0])
    assert verified.accepted.tolist() == [1, 0]
    assert verified.next.tolist() == [right[0][2], right[1][0]]


def test_moved_slot_goes_on(llms: dict[str, LLM]) -> None:
    """Both caches move: the target's next token and the drafter's guesses are the same in the new slot."""
    llm, prompt = llms["tiny"], [40, 41, 42, 43]
    executor = llm.executor
    sampling = Sampling.of([SamplingParams(seed=0)], [()])
    anchor = verify(executor, [prompt], [0], [5], [0]).next
    kv_len = torch.tensor([len(prompt)])
    drafts = drafted(executor, anchor, kv_len, torch.tensor([5]), sampling, 7)
    executor.move_slot(5, 2, len(prompt))
    assert torch.equal(drafted(executor, anchor, kv_len, torch.tensor([2]), sampling, 7), drafts)
    step = [anchor.tolist() + drafts[0].tolist()]
    old, new = (verify(executor, step, [len(prompt)], [slot], [len(step[0]) - 1]) for slot in (5, 2))
    assert torch.equal(old.accepted, new.accepted) and torch.equal(old.next, new.next)


def test_a_full_sequence_leaves_its_neighbour_alone(llms: dict[str, LLM]) -> None:
    """At the last position a block reaches past max_seq_len, into the lookahead, and no further."""
    llm = llms["llama"]
    limit = llm.executor.max_seq_len
    other = greedy(llm, [5, 6, 7], 30)
    long_prompt = [3 + i % 90 for i in range(limit - 3)]
    outputs = llm.generate([long_prompt, [5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 3
    assert outputs[0].outputs[0].finish_reason == "length"
    assert outputs[1].outputs[0].token_ids == other


def test_fewer_guesses_are_the_first_of_all(llms: dict[str, LLM]) -> None:
    """The block is drafted whole however many of its guesses are asked for."""
    executor = llms["tiny"].executor
    sampling = Sampling.of([SamplingParams(temperature=1.0, seed=4)] * 2, [()] * 2)
    for slot, prompt in enumerate(([40, 41, 42], [50, 51])):
        verify(executor, [prompt], [0], [slot], [0])
    where = torch.tensor([60, 61]), torch.tensor([3, 2]), torch.arange(2)
    whole = drafted(executor, *where, sampling, 7)
    assert whole.shape == (2, 7)
    for count in range(1, 7):
        assert torch.equal(drafted(executor, *where, sampling, count), whole[:, :count])


def test_overflow_is_told(tmp_path: Path) -> None:
    """Weights that fit float16 may make values that do not."""
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target"))
    file = tmp_path / "target/model.safetensors"
    tensors = load_file(file)
    save_file({name: t * 1000 if "down_proj" in name or "up_proj" in name else t for name, t in tensors.items()}, file)
    options = tmp_path / "engine", tmp_path / "target", tmp_path / "drafter"
    overflowed = build_pair(*options, dtype="float16").generate([[5, 6]], SamplingParams(max_tokens=4))[0].outputs[0]
    assert overflowed.finish_reason == "error"
    assert "not finite in float16; build the engine with --dtype bfloat16" in (overflowed.error or "")
    assert build_pair(*options, dtype="float32").generate([[5, 6]], SamplingParams(max_tokens=4))[0].outputs
