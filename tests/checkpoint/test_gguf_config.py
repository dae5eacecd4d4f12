"""Target configs out of GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.gguf_config import target_config
from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.errors import UserError
from tests.checkpoint import tiny_gguf

SCALING = "llama.rope.scaling."


def read(tmp_path: Path, **changes: Any) -> TargetConfig:
    return target_config(GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", changes=changes)))


def test_a_real_model(smollm2: GGUFFile) -> None:
    assert target_config(smollm2) == TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig("default", 100000.0, 64),
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2, 0, 4),
    )


def test_qwen3(tmp_path: Path) -> None:
    sizes = {
        "qwen3.attention.key_length": 8,
        "qwen3.attention.value_length": 8,
        "qwen3.attention.head_count_kv": None,
    }
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen3", changes=sizes)
    config = target_config(GGUFFile(path))
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.head_dim == 8 and config.num_key_value_heads == config.num_attention_heads


def test_untied(tmp_path: Path) -> None:
    head = {"output.weight": np.zeros((tiny_gguf.VOCAB, tiny_gguf.HIDDEN), np.float32)}
    assert not target_config(GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", extra=head))).tie_word_embeddings


def test_end_of_turn_ends_a_text(tmp_path: Path) -> None:
    assert read(tmp_path, **{"tokenizer.ggml.eot_token_id": 9}).eos_token_ids == (2, 9)


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {SCALING + "type": "linear", SCALING + "factor": 2.0}
    assert read(tmp_path, **linear).rope == RopeConfig("linear", 10000.0, 8, 2.0)
    yarn = {SCALING + "type": "yarn", SCALING + "factor": 4.0, SCALING + "original_context_length": 64}
    assert read(tmp_path, **yarn).rope == RopeConfig("yarn", 10000.0, 8, 4.0, 64)
    unscaled = {SCALING + "type": "none", SCALING + "finetuned": True}
    assert read(tmp_path, **unscaled).rope.kind == "default"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.block_count": None}, "llama.block_count must be an integer, at least 1"),
        ({"llama.block_count": 2.5}, "llama.block_count is 2.5: must be an integer"),
        ({"llama.rope.freq_base": None}, "llama.rope.freq_base must be a positive number"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8: not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window is 4096: not supported"),
        ({"llama.attention.head_count_kv": 3}, "llama.attention.head_count_kv is 3: must divide"),
        (
            {"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5},
            "llama.embedding_length is 32",
        ),
        (
            {"llama.rope.dimension_count": 4},
            "llama.rope.dimension_count is 4: must be the width of a head, 8",
        ),
        ({"llama.attention.key_length": 7, "llama.rope.dimension_count": None}, "not 7"),
        ({"llama.vocab_size": 95}, "llama.vocab_size is 95: differs from the 96 rows of token_embd.weight"),
        ({SCALING + "type": "longrope"}, "llama.rope.scaling.type is 'longrope': not supported"),
        (
            {SCALING + "factor": 2.0},
            "llama.rope.scaling.factor is 2.0: not supported with rope scaling of type none",
        ),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear is 2.0: not supported"),
        (
            {SCALING + "type": "yarn", SCALING + "factor": 2.0, SCALING + "yarn_log_multiplier": 0.5},
            "llama.rope.scaling.yarn_log_multiplier is 0.5: not supported with rope scaling of type yarn",
        ),
        ({SCALING + "type": "linear"}, "llama.rope.scaling.factor must be a positive number"),
    ],
)
def test_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        read(tmp_path, **changes)
    assert str(refusal.value).startswith(f"{tmp_path / 'm.gguf'}: ")
    assert message in str(refusal.value)


def test_refuses_other_architectures(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "gemma")
    with pytest.raises(UserError, match=r"general\.architecture is 'gemma': not supported; supported are llama, qwen3"):
        target_config(GGUFFile(path))
