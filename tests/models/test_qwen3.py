"""Qwen3 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.models import qwen3
from tests.models.test_llama import ROPE, check_against
from tests.tiny_models import random_target

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "yarn": {"rope_parameters": {"rope_theta": 1000000.0, **ROPE["yarn"]}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_equals_transformers(tmp_path: Path, variant: str) -> None:
    theirs = random_target(tmp_path, "qwen3", **VARIANTS[variant])
    check_against(qwen3, theirs, tmp_path)
