"""Rotary tables against transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.models.rotary import rotary_table
from tests.models.test_llama import ROPE
from tests.tiny_models import random_target


def test_tables_equal_transformers_bit_for_bit(tmp_path: Path) -> None:
    for name, rope in ROPE.items():
        theirs = random_target(tmp_path / name, rope_parameters={"rope_theta": 10000.0, **rope})
        config = TargetConfig.from_pretrained(tmp_path / name)
        table = rotary_table(config.rope, 300, torch.float32, torch.device("cpu"))
        cos, sin = LlamaRotaryEmbedding(theirs.config)(torch.zeros(1), torch.arange(300)[None])
        assert torch.equal(table.cos, cos[0, :, : config.head_dim // 2])
        assert torch.equal(table.sin, sin[0, :, : config.head_dim // 2])
