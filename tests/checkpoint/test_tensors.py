from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.tensors import drafter_tensors, target_tensors

PATH = Path("config.json")


def test_the_drafter_of_qwen3_8b(z_lab_config: dict[str, Any]) -> None:
    """The published checkpoint has 58 tensors and 1.0486 billion parameters."""
    config = z_lab_config | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [1, 9, 17, 25, 33]},
    }
    tensors = drafter_tensors(DrafterConfig.from_dict(config, PATH))
    assert len(tensors) == 58
    assert round(sum(map(math.prod, tensors.values())) / 1e9, 4) == 1.0486
    assert tensors["fc.weight"] == (4096, 20480)
    assert tensors["layers.0.self_attn.k_proj.weight"] == (1024, 4096)
    assert tensors["layers.4.mlp.down_proj.weight"] == (4096, 12288)


def test_biases_of_a_target(llama_config: dict[str, Any]) -> None:
    config = replace(TargetConfig.from_dict(llama_config, PATH), attention_bias=True, mlp_bias=True)
    tensors = target_tensors(config)
    assert tensors["model.layers.2.self_attn.o_proj.bias"] == (32,)
    assert tensors["model.layers.0.self_attn.k_proj.bias"] == (16,)
    assert tensors["model.layers.0.mlp.gate_proj.bias"] == (48,)
    assert not any("norm.bias" in name for name in tensors)
