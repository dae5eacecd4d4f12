"""Target configs in transformers' spellings, and what in them is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.errors import UserError

PATH = Path("model/config.json")
REQUIRED = [
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
]


def test_reads_llama(llama_config: dict[str, Any]) -> None:
    assert TargetConfig.from_dict(llama_config, PATH) == TargetConfig(
        architecture="LlamaForCausalLM",
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
        rope=RopeConfig("default", 10000.0, 8),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_what_may_be_absent(llama_config: dict[str, Any]) -> None:
    for key in ("num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id"):
        del llama_config[key]
    config = TargetConfig.from_dict(llama_config, PATH)
    assert config.num_key_value_heads == 4
    assert not config.tie_word_embeddings
    assert config.bos_token_id is None and config.eos_token_ids == ()


@pytest.mark.parametrize("key", REQUIRED)
def test_all_else_is_required(llama_config: dict[str, Any], key: str) -> None:
    del llama_config[key]
    with pytest.raises(UserError, match=f"^model/config.json: {key} is required$"):
        TargetConfig.from_dict(llama_config, PATH)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_qwen3_derives_nothing(qwen3_config: dict[str, Any], key: str) -> None:
    del qwen3_config[key]
    with pytest.raises(UserError, match=f"^model/config.json: {key} is required$"):
        TargetConfig.from_dict(qwen3_config, PATH)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("tied", [None, False, True])
def test_reads_what_transformers_saves(tmp_path: Path, config_class: Any, tied: bool | None) -> None:
    """Transformers 5 writes `tie_word_embeddings` whether or not it was given."""
    given_tie = {} if tied is None else {"tie_word_embeddings": tied}
    saved = config_class(architectures=[config_class.__name__.replace("Config", "ForCausalLM")], **given_tie)
    saved.save_pretrained(tmp_path)
    config = TargetConfig.from_pretrained(tmp_path)
    assert config.tie_word_embeddings is bool(tied)
    assert config.head_dim == saved.head_dim and config.vocab_size == saved.vocab_size
    assert config.rope.theta == saved.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 2]}, (7, 2))],
)
def test_generation_config_decides_the_end_tokens(
    tmp_path: Path,
    write_json: Callable[[str, Any], Path],
    llama_config: dict[str, Any],
    generation: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    write_json("config.json", llama_config)
    if generation is not None:
        write_json("generation_config.json", generation)
    assert TargetConfig.from_pretrained(tmp_path).eos_token_ids == expected


@given(
    qwen3=st.booleans(),
    sizes=st.lists(st.integers(1, 1 << 12), min_size=4, max_size=4),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    bos=st.none() | st.integers(0, 1000),
    eos=st.lists(st.integers(0, 1000), max_size=3),
)
def test_round_trip(
    qwen3: bool,
    sizes: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    flags: tuple[bool, bool, bool],
    bos: int | None,
    eos: list[int],
) -> None:
    config = TargetConfig(
        architecture="Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM",
        vocab_size=sizes[0] + 1000,
        hidden_size=sizes[1],
        intermediate_size=sizes[2],
        num_hidden_layers=sizes[3],
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope=RopeConfig("linear", 1e6, head_dim, 2.0),
        tie_word_embeddings=flags[0],
        attention_bias=flags[1],
        mlp_bias=flags[2] and not qwen3,
        bos_token_id=bos,
        eos_token_ids=tuple(eos),
    )
    assert TargetConfig.from_dict(config.to_dict(), PATH) == config


def test_what_it_writes_is_a_transformers_config(tmp_path: Path, llama_config: dict[str, Any]) -> None:
    config = replace(TargetConfig.from_dict(llama_config, PATH), attention_bias=True)
    LlamaConfig(**config.to_dict()).save_pretrained(tmp_path)
    assert TargetConfig.from_pretrained(tmp_path) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            'architectures is ["MistralForCausalLM"]: not supported as a target; supported are LlamaForCausalLM, '
            "Qwen3ForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu": only "silu" is supported'),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            'quantization_config.quant_method is "awq": not supported; supported is "modelopt"',
        ),
        ({"quantization_config": {}}, "quantization_config.quant_method is required"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: must divide num_attention_heads, 4"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size is 32: must be a multiple"),
        ({"head_dim": 7}, "head_dim is 7: must be even"),
        ({"hidden_size": 20}, "head_dim must be even for a rotary embedding, not 5"),
        ({"vocab_size": 0}, "vocab_size is 0: must be at least 1"),
        ({"vocab_size": True}, "vocab_size is true: must be an integer"),
        ({"vocab_size": 96.0}, "vocab_size is 96.0: must be an integer"),
        ({"hidden_size": "32"}, 'hidden_size is "32": must be an integer'),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0: must be positive"),
        ({"rms_norm_eps": "1e-5"}, 'rms_norm_eps is "1e-5": must be a number'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1: must be true or false"),
        ({"hidden_act": 3}, "hidden_act is 3: must be a string"),
        ({"eos_token_id": 10**30}, "must be below vocab_size, 96"),
        ({"eos_token_id": [2, -1]}, "eos_token_id is [2, -1]: must be a list of integers"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear": must be an object'),
    ],
)
def test_refuses(llama_config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        TargetConfig.from_dict(llama_config | changes, PATH)
    assert str(refusal.value).startswith("model/config.json: ")
    assert message in str(refusal.value)


def test_refuses_mlp_biases_in_qwen3(qwen3_config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="mlp_bias is true: Qwen3 has no MLP biases"):
        TargetConfig.from_dict(qwen3_config | {"mlp_bias": True}, PATH)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("{", "is not JSON"), ("[1]", "must hold a JSON object, not list")],
)
def test_refuses_what_is_no_config(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as refusal:
        TargetConfig.from_pretrained(tmp_path)
    assert str(refusal.value).startswith(f"{path}: {message}")
