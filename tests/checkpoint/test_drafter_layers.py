"""Windows and causality of a drafter's layers against the authors' package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dflash.model import Qwen3DFlashAttention
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config

from dflash_trt.checkpoint.drafter_layers import DraftLayer, read_layers
from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.errors import UserError

PATH = Path("draft/config.json")
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 8,
}
TYPES = ("full_attention", "sliding_attention")


@given(
    layer_types=st.none() | st.lists(st.sampled_from(TYPES), min_size=1, max_size=4),
    use_sliding_window=st.none() | st.booleans(),
    is_causal=st.none() | st.booleans(),
    max_window_layers=st.integers(0, 4),
)
def test_follows_the_authors(
    layer_types: list[str] | None,
    use_sliding_window: bool | None,
    is_causal: bool | None,
    max_window_layers: int,
) -> None:
    values: dict[str, Any] = {
        "num_hidden_layers": len(layer_types) if layer_types else 3,
        "sliding_window": 16,
        "max_window_layers": max_window_layers,
    }
    optional = {"layer_types": layer_types, "use_sliding_window": use_sliding_window, "is_causal": is_causal}
    values |= {key: value for key, value in optional.items() if value is not None}

    config = Qwen3Config(**SIZES, **values)
    theirs = [Qwen3DFlashAttention(config, index) for index in range(config.num_hidden_layers)]
    ours = read_layers(JsonObject(values, PATH), sliding_is_causal=True)
    assert ours == tuple(DraftLayer(layer.sliding_window, layer.is_causal) for layer in theirs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"]}, 'layer_types is ["full_attention"]: must be 2 times'),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types is"),
        ({"use_sliding_window": True}, "sliding_window is required"),
        ({"use_sliding_window": True, "sliding_window": 16}, "max_window_layers is required"),
    ],
)
def test_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_layers(JsonObject({"num_hidden_layers": 2} | values, PATH), sliding_is_causal=True)
    assert str(refusal.value).startswith(f"draft/config.json: {message}")
