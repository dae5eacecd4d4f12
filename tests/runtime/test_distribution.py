"""Sampled outputs follow the target's probabilities, whatever the drafter guesses."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import build_pair
from tests.tiny_models import random_drafter, random_target

VOCAB_SIZE, DRAWS = 11, 20_000
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


@pytest.mark.parametrize("name", PARAMS)
def test_joint_of_three_tokens(tmp_path: Path, name: str) -> None:
    target = random_target(tmp_path / "target", vocab_size=VOCAB_SIZE, num_hidden_layers=2, hidden_size=32)
    random_drafter(tmp_path / "drafter", target, num_hidden_layers=1, target_layer_ids=(0, 1))
    llm = build_pair(tmp_path / "engine", tmp_path / "target", tmp_path / "drafter", max_batch_size=500)
    params = [SamplingParams(max_tokens=3, seed=seed, ignore_eos=True, **PARAMS[name]) for seed in range(DRAWS)]
    generation = llm.generate([PROMPT] * DRAWS, params, verify_window=llm.executor.max_window)
    assert generation.statistics.accepted_tokens > 1000  # speculation took part

    counts = np.zeros((VOCAB_SIZE,) * 3)
    for output in generation:
        counts[tuple(output.outputs[0].token_ids)] += 1
    expected = DRAWS * expected_joint(target.double(), **PARAMS[name])
    assert counts[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = np.append(counts[frequent], counts[~frequent].sum())
    predicted = np.append(expected[frequent], expected[~frequent].sum())
    if predicted[-1] < 5:
        observed, predicted = observed[:-1], predicted[:-1] * observed[:-1].sum() / predicted[:-1].sum()
    assert stats.chisquare(observed, predicted).pvalue > 0.01
