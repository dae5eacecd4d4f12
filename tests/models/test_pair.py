"""Quantized pairs against transformers and the authors' package, whose weights, inputs and caches are quantized too."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import extract_context_feature
from torch import Tensor

from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.torch_executor import TorchVerifier
from tests.conftest import build_pair
from tests.models.eager import assert_close, span
from tests.quantized_models import (
    FakeFP8Cache,
    quantized_drafter,
    quantized_target,
    reference_drafter,
    reference_target,
)
from tests.tiny_models import random_drafter, random_target

ALGORITHMS: list[QuantAlgo] = ["FP8", "NVFP4", "W4A16_NVFP4"]


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(3))


def build(root: Path) -> LLM:
    return build_pair(root / "engine", root / "target", root / "drafter")


@torch.inference_mode()
def target_logits(executor: RankExecutor, tokens: Tensor) -> Tensor:
    """The target's logits of every token, in chunks of a prompt and one by one."""
    logits, verifier = [], executor.verifier
    assert isinstance(verifier, TorchVerifier)
    bounds = (0, 7, 14, 21, 22, 23, 24)
    for start, end in pairwise(bounds):
        rows = torch.arange(end - start).expand(len(tokens), -1)
        where = span([start] * len(tokens), end - start)
        chunk = tokens[:, start:end]
        logits.append(verifier.model.pair.target_pass(verifier.model.ops, chunk, rows, verifier.caches, where))
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def draft_logits(executor: RankExecutor, length: int, block: Tensor) -> Tensor:
    """The drafter's logits for a block that follows what the caches hold."""
    verifier, where = executor.verifier, span([length] * len(block), block.shape[1])
    assert isinstance(verifier, TorchVerifier) and verifier.caches.drafter is not None
    model = verifier.model
    return model.pair.drafter_pass(model.ops, block, block.shape[1] - 1, verifier.caches.drafter, where)


@torch.inference_mode()
def expected_drafts(target: Any, drafter: Any, tokens: Tensor, block: Tensor, cache: Any = None) -> Tensor:
    states = target(tokens, output_hidden_states=True).hidden_states
    hidden = drafter(
        target_hidden=extract_context_feature(states, drafter.target_layer_ids),
        noise_embedding=target.model.embed_tokens(block),
        position_ids=torch.arange(tokens.shape[1] + block.shape[1]).expand(len(block), -1),
        past_key_values=cache,
    )
    return drafter.compute_logits(hidden[:, 1:], target.lm_head)


def block_of(anchors: list[int]) -> Tensor:
    block = torch.full((len(anchors), 4), 2)
    block[:, 0] = torch.tensor(anchors)
    return block


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("algo", ALGORITHMS)
@torch.inference_mode()
def test_target(tmp_path: Path, tokens: Tensor, algo: QuantAlgo, fp8_cache: bool, family: str) -> None:
    """Weights, activations where the format quantizes them, and the cache; a drafter of another kind changes nothing."""
    overrides = {"attention_bias": True} if family == "llama" else {"tie_word_embeddings": True}
    unquantized = quantized_target(tmp_path / "target", algo, fp8_cache=fp8_cache, family=family, **overrides)
    random_drafter(tmp_path / "drafter", unquantized)
    theirs = reference_target(tmp_path / "target")
    cache = FakeFP8Cache(tmp_path / "target", "model.") if fp8_cache else None
    expected = theirs(tokens, past_key_values=cache).logits

    llm = build(tmp_path)
    assert_close(target_logits(llm.executor, tokens), expected, 1e-9)
    assert (expected - unquantized.double()(tokens).logits).abs().max() > 0.1


@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize("algo", [*ALGORITHMS, None])
def test_drafter(tmp_path: Path, tokens: Tensor, algo: QuantAlgo | None, fp8_cache: bool) -> None:
    """And its target, which is not quantized, computes what it does beside any drafter."""
    target = random_target(tmp_path / "target")
    quantized_drafter(tmp_path / "drafter", target, algo, fp8_cache=fp8_cache)
    theirs, block = reference_drafter(tmp_path / "drafter"), block_of([5, 6])
    cache = FakeFP8Cache(tmp_path / "drafter", "") if fp8_cache else None
    reference = reference_target(tmp_path / "target")
    expected = expected_drafts(reference, theirs, tokens, block, cache)
    assert cache is None or cache.get_seq_length() == tokens.shape[1] + block.shape[1]

    llm = build(tmp_path)
    with torch.inference_mode():
        assert_close(target_logits(llm.executor, tokens), reference(tokens).logits, 1e-9)
    assert_close(draft_logits(llm.executor, tokens.shape[1], block), expected, 1e-9)
