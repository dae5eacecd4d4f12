"""Configs as real checkpoints have them, at toy sizes, and the GGUF file of a real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.examples.smollm2 import gguf_file


@pytest.fixture
def llama_config() -> dict[str, Any]:
    """A Llama config in transformers 4's spelling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


@pytest.fixture
def qwen3_config(llama_config: dict[str, Any]) -> dict[str, Any]:
    """A Qwen3 config in transformers 5's spelling."""
    config = llama_config | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
    }
    del config["rope_theta"]
    return config


@pytest.fixture
def z_lab_config(qwen3_config: dict[str, Any]) -> dict[str, Any]:
    """A drafter of the authors' for the toy targets."""
    return qwen3_config | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": 3,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
    }


@pytest.fixture
def speculators_config(z_lab_config: dict[str, Any]) -> dict[str, Any]:
    """The same drafter in vLLM's format, with a head over 40 tokens."""
    body = {
        key: value
        for key, value in z_lab_config.items()
        if key not in ("architectures", "num_target_layers", "block_size", "dflash_config")
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": body,
        "block_size": 4,
        "draft_vocab_size": 40,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": 95,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
    }


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Writes a JSON file into the test's directory."""

    def write(name: str, values: Any) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(values))
        return path

    return write


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return gguf_file()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> GGUFFile:
    return GGUFFile(smollm2_path)
