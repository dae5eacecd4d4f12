"""Acceptance lengths against those of the authors' own loop."""

from __future__ import annotations

import json
import time
from pathlib import Path

import dflash.model
import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_trt.benchmarking.acceptance import measure_acceptance
from dflash_trt.benchmarking.quality import HeldOutText
from dflash_trt.checkpoint.encoding import encode_conversation
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from tests.benchmarking.conftest import PROMPTS

MAX_TOKENS = 40


def authors_passes(pair: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens that each pass of the authors' loop emitted for each prompt."""
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float64).eval()
    drafter = DFlashDraftModel(Qwen3Config(**json.loads((pair / "drafter/config.json").read_text()))).eval()
    drafter.load_state_dict(load_file(pair / "drafter/model.safetensors"))
    # A block more than is compared: the authors draft shorter blocks, which hold other guesses, near the end.
    return [
        dflash_generate(
            drafter.double(), target, torch.tensor([ids]), MAX_TOKENS + 8, stop_token_ids=[0], return_stats=True
        ).acceptance_lengths
        for ids in prompts
    ]


def test_counts_what_the_authors_count(trained: Path, text: HeldOutText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
    messages = ([{"role": "user", "content": prompt}] for prompt in PROMPTS[:4])
    prompts = [encode_conversation(text.tokenizer, each, "here", add_generation_prompt=True) for each in messages]
    verifications = decoded = 0
    for passes in authors_passes(trained, prompts):
        left = MAX_TOKENS - 1  # the first token is the prompt's pass
        for emitted in passes:
            if left:
                verifications, decoded, left = verifications + 1, decoded + min(left, emitted), max(0, left - emitted)
    told: list[int] = []
    found = measure_acceptance(
        open_target(trained / "target"),
        open_drafter(trained / "drafter"),
        prompts,
        text.tokenizer,
        MAX_TOKENS,
        torch.float64,
        told.append,
    )
    assert (found.verifications, found.decoded_tokens) == (verifications, decoded)
    assert found.acceptance_length == decoded / verifications > 2
    assert sum(told) == len(prompts)
