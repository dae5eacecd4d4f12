"""Any JSON value in any field of a config: read, or refused in one line, quickly and without a crash."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.sizes import LARGEST_SIZES
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.errors import UserError
from dflash_trt.models.rotary import rotary_table

ABSURD = [
    None,
    True,
    *(0, -1, 1, 3, 7, 10**9, 10**18, 2**63, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "full_attention", "\ud800", "x\n" * 100, "9" * 400),
    *(
        [],
        {},
        [0],
        [-1],
        [10**400],
        [None],
        [[]],
        [{}] * 50,
        [3, 3],
        {"": {}},
        {"rope_type": "yarn"},
        {"name": [1e999]},
    ),
]
JSON = st.recursive(
    st.sampled_from(ABSURD) | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "truncate": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
BODY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
TARGET = {
    **{key: value for key, value in BODY.items() if key not in ("sliding_window", "max_window_layers")},
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 256,
    "rope_scaling": YARN,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
    "tie_word_embeddings": True,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2],
    "partial_rotary_factor": 1,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
        "group_size": 16,
        "ignore": ["lm_head"],
    },
}
Z_LAB = {
    **BODY,
    "architectures": ["DFlashDraftModel"],
    "rope_scaling": LLAMA3,
    "block_size": 4,
    "num_target_layers": 4,
    "is_causal": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 30.0,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1], "causal": False},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": BODY,
    "block_size": 4,
    "draft_vocab_size": 64,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [1, 2],
    "sample_from_anchor": False,
    "shift_label": False,
    "sliding_window_non_causal": False,
    "projector_type": "dflash",
    "target_hidden_size": 32,
    "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
}
CONFIGS: dict[str, tuple[type[TargetConfig] | type[DrafterConfig], dict[str, Any]]] = {
    "target": (TargetConfig, TARGET),
    "z-lab": (DrafterConfig, Z_LAB),
    "speculators": (DrafterConfig, SPECULATORS),
}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where something stands in a JSON value, all of it included."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """A copy with another value at one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def read(directory: Path, kind: str, content: Any) -> None:
    """Read it as a file; a config that is taken has rotary tables that can be run with, in every type."""
    (directory / "config.json").write_text(json.dumps(content))
    began = time.process_time()
    try:
        config = CONFIGS[kind][0].from_pretrained(directory)
    except UserError as refusal:
        message = str(refusal)
        assert message.startswith(f"{directory / 'config.json'}: ") and len(message) < 2000
        message.encode()
    else:
        assert bool((inverse_frequencies(config.rope) > 0).all())
        table = rotary_table(config.rope, 128, torch.float16, torch.device("cpu"))
        assert bool(torch.isfinite(table.cos).all() and torch.isfinite(table.sin).all())
        assert all(
            getattr(config, name, None) is None or 1 <= getattr(config, name) <= largest
            for name, largest in LARGEST_SIZES.items()
        )
    assert time.process_time() - began < 5


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_configs_are_good(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind][1]))
    CONFIGS[kind][0].from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", CONFIGS)
def test_absurd_values_everywhere(tmp_path: Path, kind: str) -> None:
    for place in places(CONFIGS[kind][1]):
        for value in ABSURD:
            read(tmp_path, kind, replaced(CONFIGS[kind][1], place, value))


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_value_in_any_fields(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    content = CONFIGS[kind][1]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(content))))
        content = replaced(content, place, data.draw(JSON))
    read(tmp_path_factory.getbasetemp(), kind, content)


@pytest.mark.parametrize("kind", CONFIGS)
def test_sizes_beyond_any_model_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    content = CONFIGS[kind][1]
    for place in places(content):
        name = place[-1] if place else None
        if isinstance(name, str) and name in LARGEST_SIZES:
            for value in (LARGEST_SIZES[name] + 1, 10**18, 10**400, 0, -1):
                (tmp_path / "config.json").write_text(json.dumps(replaced(content, place, value)))
                with pytest.raises(UserError, match=rf"config\.json: ([\w.]+\.)?{name} is -?\d+(\.\.\.)?: must be at"):
                    CONFIGS[kind][0].from_pretrained(tmp_path)


@pytest.mark.parametrize("content", ["[" * 5000, '{"a":' * 70 + "1" + "}" * 70, " " * (17 << 20), "\ufeff{}"])
def test_files_that_no_config_needs(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: is (nested more than 64|larger than|not JSON)"):
        TargetConfig.from_pretrained(tmp_path)
