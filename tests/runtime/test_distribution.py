"""Sampled outputs follow the target's probabilities, whatever the drafter guesses."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import Sampling, SamplingParams
from dflash_trt.runtime.speculative import decode, prefill
from tests.conftest import build_pair
from tests.tiny_models import random_drafter, random_target

VOCAB_SIZE, DRAWS, BATCH = 11, 20_000, 500
PROMPT = [3, 4, 5]
PARAMS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "top-k and top-p": {"temperature": 1.0, "top_k": 7, "top_p": 0.8},
}


def probabilities(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """One row's distribution, by the textbook and for one row at a time."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    mass, kept = 0.0, []
    for token in order:
        if mass >= top_p * weights.sum():
            break
        kept.append(token)
        mass += weights[token]
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result / result.sum()


@torch.inference_mode()
def expected_joint(target: Any, **params: Any) -> np.ndarray:
    """P(first three tokens), [V, V, V], from transformers' logits."""
    joint = np.ones((VOCAB_SIZE,) * 3)
    for depth in range(3):
        for prefix in product(range(VOCAB_SIZE), repeat=depth):
            logits = target(torch.tensor([PROMPT + list(prefix)])).logits[0, -1]
            shape = (VOCAB_SIZE,) + (1,) * (2 - depth)
            joint[prefix] *= probabilities(logits.numpy(), **params).reshape(shape)
    return joint


def draw(llm: LLM, params: list[SamplingParams]) -> tuple[list[list[int]], int]:
    """Three tokens or more for each, `BATCH` at a time, and how many draft tokens were accepted.

    The prompt is run once and copied to every slot. What a batch writes after it, the next one overwrites.
    """
    executor, outputs, accepted = llm.executor, [], 0
    first = llm.new_request(PROMPT[:-1], params[0], where="prompt")
    prefill(executor, first, 0, 0, Sampling.of([first.params], [first.edits]))
    for slot in range(1, BATCH):
        executor.move_slot(0, slot, len(PROMPT) - 1)
    for start in range(0, len(params), BATCH):
        requests = [llm.new_request(PROMPT, each, where="prompt") for each in params[start : start + BATCH]]
        sampling = Sampling.of([each.params for each in requests], [each.edits for each in requests])
        while min(len(request.output) for request in requests) < 3:
            for request, block in zip(
                requests, decode(executor, requests, sampling, [executor.max_window] * BATCH), strict=True
            ):
                request.tokens += block.tokens
        outputs += [request.output[:3] for request in requests]
        accepted += sum(request.statistics.accepted_tokens for request in requests)
    return outputs, accepted


@pytest.mark.parametrize("name", PARAMS)
def test_joint_of_three_tokens(tmp_path: Path, name: str) -> None:
    target = random_target(tmp_path / "target", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=32)
    random_drafter(tmp_path / "drafter", target, num_hidden_layers=1, target_layer_ids=(0, 1))
    llm = build_pair(tmp_path / "engine", tmp_path / "target", tmp_path / "drafter", max_batch_size=BATCH)
    outputs, accepted = draw(llm, [SamplingParams(seed=seed, ignore_eos=True, **PARAMS[name]) for seed in range(DRAWS)])
    assert accepted > 1000  # speculation took part

    counts = np.zeros((VOCAB_SIZE,) * 3)
    for output in outputs:
        counts[tuple(output)] += 1
    expected = DRAWS * expected_joint(target.double(), **PARAMS[name])
    assert counts[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    predicted = np.append(expected[frequent], expected[~frequent].sum())
    if predicted[-1] < 5:
        observed, predicted = observed[:-1], predicted[:-1] * observed[:-1].sum() / predicted[:-1].sum()
    assert stats.chisquare(observed, predicted).pvalue > 0.01
