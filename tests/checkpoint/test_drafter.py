"""Drafter configs of both formats, and what in them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.drafter import DrafterConfig, DraftLayer
from dflash_trt.checkpoint.rope import RopeConfig
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER

PATH = Path("draft/config.json")


def moved(config: dict[str, Any], **draft: Any) -> dict[str, Any]:
    """The config with these keys in its `dflash_config`."""
    return config | {"dflash_config": config["dflash_config"] | draft}


def test_reads_z_lab(z_lab_config: dict[str, Any]) -> None:
    assert DrafterConfig.from_dict(z_lab_config, PATH) == DrafterConfig(
        format="z-lab",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=96,
        rms_norm_eps=1e-5,
        rope=RopeConfig("default", 1e6, 16),
        attention_bias=False,
        block_size=4,
        mask_token_id=95,
        target_layer_ids=(0, 2),
        num_target_layers=3,
        layers=(DraftLayer(None, False),) * 2,
    )


def test_reads_the_example() -> None:
    config = DrafterConfig.from_pretrained(DRAFTER)
    assert (config.block_size, config.mask_token_id) == (8, 16)
    assert config.target_layer_ids == (1, 8, 15, 21, 27)


def test_block_size_may_be_in_either_place(z_lab_config: dict[str, Any]) -> None:
    expected = DrafterConfig.from_dict(z_lab_config, PATH)
    both = moved(z_lab_config, block_size=4)
    inside = {key: value for key, value in both.items() if key != "block_size"}
    assert DrafterConfig.from_dict(both, PATH) == DrafterConfig.from_dict(inside, PATH) == expected


def test_scales(z_lab_config: dict[str, Any]) -> None:
    changed = moved(z_lab_config, input_embedding_scale=5.5, output_multiplier=0.25)
    config = DrafterConfig.from_dict(changed | {"final_logit_softcapping": 30.0}, PATH)
    assert config.input_embedding_scale == 5.5
    assert config.output_multiplier == 0.25
    assert config.final_logit_softcapping == 30.0


@pytest.mark.parametrize("off", [None, 0, 0.0])
def test_no_cap(z_lab_config: dict[str, Any], off: float | None) -> None:
    assert (
        DrafterConfig.from_dict(z_lab_config | {"final_logit_softcapping": off}, PATH).final_logit_softcapping is None
    )


def test_formats_agree(z_lab_config: dict[str, Any], speculators_config: dict[str, Any]) -> None:
    """Taps are numbered alike once read: the residual after that 0-based layer."""
    authors = DrafterConfig.from_dict(z_lab_config, PATH)
    vllm = DrafterConfig.from_dict(speculators_config, PATH)
    assert vllm.target_layer_ids == authors.target_layer_ids == (0, 2)
    assert vllm.draft_vocab_size == 40 and vllm.has_reduced_vocabulary and not authors.has_reduced_vocabulary
    for field in ("hidden_size", "head_dim", "rope", "layers", "block_size", "mask_token_id", "vocab_size"):
        assert getattr(vllm, field) == getattr(authors, field)


def test_full_vocabulary_needs_no_map(speculators_config: dict[str, Any]) -> None:
    assert not DrafterConfig.from_dict(speculators_config | {"draft_vocab_size": 96}, PATH).has_reduced_vocabulary


@pytest.mark.parametrize("non_causal", [False, True])
def test_sliding_layers_of_speculators(speculators_config: dict[str, Any], non_causal: bool) -> None:
    speculators_config["sliding_window_non_causal"] = non_causal
    speculators_config["transformer_layer_config"] |= {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    layers = DrafterConfig.from_dict(speculators_config, PATH).layers
    assert layers == (DraftLayer(64, not non_causal), DraftLayer(None, False))


@pytest.mark.parametrize("key", ["block_size", "dflash_config", "vocab_size", "head_dim", "hidden_act", "rms_norm_eps"])
def test_z_lab_requires(z_lab_config: dict[str, Any], key: str) -> None:
    del z_lab_config[key]
    with pytest.raises(UserError, match=f"^draft/config.json: (dflash_config.)?{key} is required$"):
        DrafterConfig.from_dict(z_lab_config, PATH)


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_nothing_of_the_algorithm_is_assumed(z_lab_config: dict[str, Any], key: str) -> None:
    del z_lab_config["dflash_config"][key]
    with pytest.raises(UserError, match=f"^draft/config.json: dflash_config.{key} is required$"):
        DrafterConfig.from_dict(z_lab_config, PATH)


@pytest.mark.parametrize(
    ("changes", "draft", "message"),
    [
        (
            {"architectures": ["DFlash2DraftModel"]},
            {},
            'architectures is ["DFlash2DraftModel"]: not supported',
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, 'architectures is ["Qwen3ForCausalLM"]: not supported'),
        ({}, {"block_size": 8}, "dflash_config.block_size is 8: differs from the top-level block_size, 4"),
        ({"block_size": 1}, {}, "block_size is 1: must be at least 2"),
        (
            {"mask_token_id": 5},
            {},
            "dflash_config.mask_token_id is 95: differs from the top-level mask_token_id, 5",
        ),
        ({}, {"target_layer_ids": []}, "dflash_config.target_layer_ids is []: must name at least one layer"),
        ({}, {"target_layer_ids": [1, 1]}, "dflash_config.target_layer_ids is [1, 1]"),
        ({}, {"target_layer_ids": [-1]}, "dflash_config.target_layer_ids is [-1]"),
        ({}, {"causal": True}, "dflash_config.causal is true: not part of the authors' DFlash"),
        ({}, {"use_swa": True}, "dflash_config.use_swa is true"),
        ({"add_swa_attention_sink_bias": True}, {}, "add_swa_attention_sink_bias is true"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {},
            'quantization_config.quant_method is "fp8": not supported',
        ),
        ({"hidden_act": "relu"}, {}, 'hidden_act is "relu": only "silu" is supported'),
        ({"output_multiplier": -1}, {}, "output_multiplier is -1: must be positive"),
        ({"num_key_value_heads": 3}, {}, "num_key_value_heads is 3: must divide num_attention_heads, 4"),
    ],
)
def test_z_lab_refuses(
    z_lab_config: dict[str, Any], changes: dict[str, Any], draft: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refusal:
        DrafterConfig.from_dict(moved(z_lab_config | changes, **draft), PATH)
    assert str(refusal.value).startswith("draft/config.json: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dspark"}, 'speculators_model_type is "dspark": not supported'),
        ({"speculators_model_type": "dflash2"}, 'speculators_model_type is "dflash2": not supported'),
        ({"sample_from_anchor": True}, "sample_from_anchor is true"),
        ({"shift_label": True}, "shift_label is true"),
        ({"projector_type": "domino"}, 'projector_type is "domino"'),
        (
            {"target_hidden_size": 64},
            "target_hidden_size is 64: must be transformer_layer_config.hidden_size, 32",
        ),
        (
            {"draft_vocab_size": 97},
            "draft_vocab_size is 97: must not exceed transformer_layer_config.vocab_size, 96",
        ),
        ({"draft_vocab_size": None}, "draft_vocab_size is required"),
        ({"mask_token_id": None}, "mask_token_id is required"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is required"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "aux_hidden_state_layer_ids is [0, 3]"),
        (
            {"sliding_window": 2048},
            "sliding_window is 2048: differs from transformer_layer_config.sliding_window",
        ),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
            "speculators_config.proposal_methods[0].speculative_tokens is 4: a block_size of 4 drafts 3 tokens",
        ),
    ],
)
def test_speculators_refuses(speculators_config: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        DrafterConfig.from_dict(speculators_config | changes, PATH)
    assert str(refusal.value).startswith("draft/config.json: ")
    assert message in str(refusal.value)


def test_speculators_keeps_quantization_at_the_top(speculators_config: dict[str, Any]) -> None:
    speculators_config["transformer_layer_config"]["quantization_config"] = {"quant_method": "modelopt"}
    with pytest.raises(UserError, match=r"transformer_layer_config\.quantization_config is .* must stand at the top"):
        DrafterConfig.from_dict(speculators_config, PATH)


def test_names_the_place_of_a_nested_key(speculators_config: dict[str, Any]) -> None:
    speculators_config["transformer_layer_config"]["rope_parameters"]["rope_type"] = "dynamic"
    with pytest.raises(UserError, match=r'transformer_layer_config\.rope_parameters\.rope_type is "dynamic"'):
        DrafterConfig.from_dict(speculators_config, PATH)
