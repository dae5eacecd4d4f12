"""The drafter against the authors' own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import dflash_generate, extract_context_feature
from safetensors.torch import load_file, save_file

from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.torch_executor import TorchVerifier
from tests.conftest import build_pair
from tests.models.eager import assert_close, span
from tests.tiny_models import random_drafter, random_target

SLIDING = {"use_sliding_window": True, "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
    "sliding, not causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "all causal": {"is_causal": True},
    "biases": {"attention_bias": True},
    "one tap": {"target_layer_ids": (3,)},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "scaled and capped": {
        "dflash_config": {
            "mask_token_id": 2,
            "target_layer_ids": [0, 2],
            "input_embedding_scale": 6.5,
            "output_multiplier": 0.7,
            "final_logit_softcapping": 3.0,
        }
    },
}


def make_pair(root: Path, dtype: str = "float32", **drafter: Any) -> tuple[Any, Any, LLM]:
    target = random_target(root / "target", "llama")
    theirs = random_drafter(root / "drafter", target, **drafter)
    return target, theirs, build_pair(root / "engine", root / "target", root / "drafter", dtype=dtype)


@torch.inference_mode()
def draft_logits(executor: RankExecutor, ids: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The drafter's logits for `block` after the target has seen `ids`, in several chunks."""
    verifier = executor.verifier
    assert isinstance(verifier, TorchVerifier) and verifier.caches.drafter is not None
    pair, ops, held = verifier.model.pair, verifier.model.ops, verifier.caches
    batch, length = ids.shape
    for start in range(0, length, 7):
        chunk = ids[:, start : start + 7]
        pair.target_pass(
            ops, chunk, torch.zeros(batch, 1, dtype=torch.int64), held, span([start] * batch, chunk.shape[1])
        )
    return pair.drafter_pass(ops, block, block.shape[1] - 1, held.drafter, span([length] * batch, block.shape[1]))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_equals_the_authors_model(tmp_path: Path, variant: str) -> None:
    target, theirs, llm = make_pair(tmp_path, **VARIANTS[variant])
    ids, block = torch.randint(3, 97, (2, 19)), torch.full((2, 4), 2)
    block[:, 0] = torch.tensor([5, 6])

    config = getattr(theirs.config, "dflash_config", {})
    states = target(ids, output_hidden_states=True).hidden_states
    hidden = theirs(
        target_hidden=extract_context_feature(states, theirs.target_layer_ids),
        noise_embedding=target.model.embed_tokens(block) * config.get("input_embedding_scale", 1.0),
        position_ids=torch.arange(19 + 4).expand(2, -1),
    )
    expected = theirs.compute_logits(hidden[:, 1:], target.lm_head)
    assert_close(draft_logits(llm.executor, ids, block), expected)


@pytest.mark.parametrize("variant", ["full", "sliding"])
def test_authors_loop_gives_our_greedy_tokens(tmp_path: Path, variant: str) -> None:
    target, theirs, llm = make_pair(tmp_path, "float64", **VARIANTS[variant])
    target, theirs = target.double(), theirs.double()
    for seed in range(4):
        ids = torch.randint(3, 97, (1, 5 + 3 * seed), generator=torch.Generator().manual_seed(seed))
        expected = dflash_generate(theirs, target, ids, max_new_tokens=40, stop_token_ids=[1])
        ours = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=40))
        assert ids[0].tolist() + ours[0].outputs[0].token_ids == expected[0].tolist()


def as_speculators(source: Path, destination: Path, token_ids: list[int], head: torch.Tensor) -> None:
    """Rewrite a z-lab drafter in the speculators format, with a head of its own over `token_ids`."""
    config = json.loads((source / "config.json").read_text())
    draft = config.pop("dflash_config")
    offsets = torch.tensor(token_ids) - torch.arange(len(token_ids))
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[token_ids] = True
    destination.mkdir()
    (destination / "config.json").write_text(
        json.dumps(
            {
                "speculators_model_type": "dflash",
                "architectures": ["DFlashSpeculator"],
                "block_size": config.pop("block_size"),
                "mask_token_id": draft["mask_token_id"],
                "aux_hidden_state_layer_ids": [layer + 1 for layer in draft["target_layer_ids"]],
                "draft_vocab_size": len(token_ids),
                "transformer_layer_config": config,
            }
        )
    )
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "lm_head.weight": head, "d2t": offsets, "t2d": t2d}, destination / "model.safetensors")


@torch.inference_mode()
def test_own_head_of_the_speculators_format(tmp_path: Path) -> None:
    """Its rows are the target's rows of some tokens, so the logits of those are the z-lab drafter's, and no others."""
    target, _, z_lab = make_pair(tmp_path)
    token_ids = [3, 4, 9, 40, 41, 96]
    as_speculators(tmp_path / "drafter", tmp_path / "own", token_ids, target.lm_head.weight[token_ids].clone())
    llm = build_pair(tmp_path / "other", tmp_path / "target", tmp_path / "own", dtype="float32")

    ids, block = torch.randint(3, 97, (2, 12)), torch.full((2, 4), 2)
    expected, actual = (draft_logits(one.executor, ids, block) for one in (z_lab, llm))
    assert_close(actual[..., token_ids], expected[..., token_ids])
    others = [token for token in range(97) if token not in token_ids]
    assert bool((actual[..., others] == float("-inf")).all())
