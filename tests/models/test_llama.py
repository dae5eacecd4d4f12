"""Llama, and through it every part of a decoder, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.models import llama
from dflash_trt.models.rotary import rotary_table
from dflash_trt.ops.torch_ops import TorchOps
from tests.models.eager import assert_close, caches, loader, span
from tests.tiny_models import random_target

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    **{name: {"rope_parameters": {"rope_theta": 10000.0, **rope}} for name, rope in ROPE.items()},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_equals_transformers(tmp_path: Path, variant: str) -> None:
    """Logits and the residual stream after every layer: a prompt in two chunks, then one token."""
    theirs = random_target(tmp_path, "llama", **VARIANTS[variant])
    check_against(llama, theirs, tmp_path)


def check_against(family: Any, theirs: Any, directory: Path) -> None:
    config = TargetConfig.from_pretrained(directory)
    weights = family.load(loader(directory), config)
    layers = config.num_hidden_layers
    held = caches(layers, 2, config.num_key_value_heads, 40, config.head_dim)
    table = rotary_table(config.rope, 40, torch.float32, torch.device("cpu"))
    ids = torch.randint(3, config.vocab_size, (2, 24))

    expected = theirs(ids, output_hidden_states=True)
    for start, end in ((0, 15), (15, 23), (23, 24)):
        hidden, features = family.forward(
            TorchOps(), config, weights, ids[:, start:end], held, span([start] * 2, end - start), table, range(layers)
        )
        assert_close(TorchOps().linear(hidden, weights.head), expected.logits[:, start:end])
        for layer, feature in enumerate(features):
            assert_close(feature, expected.hidden_states[layer + 1][:, start:end])


@torch.inference_mode()
def test_ragged_lengths_and_rollback(tmp_path: Path) -> None:
    """Sequences of several lengths in slots out of order, after rejected rows, equal each sequence alone."""
    theirs = random_target(tmp_path, "llama")
    config = TargetConfig.from_pretrained(tmp_path)
    weights = llama.load(loader(tmp_path), config)
    held = caches(config.num_hidden_layers, 3, config.num_key_value_heads, 40, config.head_dim)
    table = rotary_table(config.rope, 40, torch.float32, torch.device("cpu"))
    ids = torch.randint(3, config.vocab_size, (2, 20))
    slots, lengths = [2, 0], [11, 4]

    def run(tokens: torch.Tensor, starts: list[int], which: list[int]) -> torch.Tensor:
        where = span(starts, tokens.shape[1], which)
        hidden, _ = llama.forward(TorchOps(), config, weights, tokens, held, where, table, ())
        return TorchOps().linear(hidden, weights.head)

    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        run(ids[row : row + 1, :length], [0], [slot])
    run(torch.randint(3, config.vocab_size, (2, 5)), lengths, slots)  # all of it rejected
    following = torch.stack([ids[row, length : length + 5] for row, length in enumerate(lengths)])
    logits = run(following, lengths, slots)
    for row, length in enumerate(lengths):
        assert_close(logits[row], theirs(ids[row : row + 1]).logits[0, length : length + 5])
