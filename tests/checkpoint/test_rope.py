"""Rotary embedding: both spellings of the config, and frequencies against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_trt.checkpoint.rope import RopeConfig, attention_scaling, inverse_frequencies, read_rope
from dflash_trt.errors import UserError

PATH = Path("model/config.json")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-not-stretched": YARN | {"factor": 1.0},
    "yarn-exact-band": YARN | {"truncate": False},
    "yarn-other-band": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.25},
    "yarn-mscale": YARN | {"mscale": 0.707},
    "yarn-mscales": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-no-band": YARN | {"original_max_position_embeddings": 64, "factor": 2.0},
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_agrees_with_transformers(scaling: dict[str, Any] | None, theta: float, head_dim: int) -> None:
    config = {"rope_theta": theta, "rope_scaling": scaling}
    rope = read_rope(config, head_dim, PATH)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters={"rope_theta": theta, **(scaling or {"rope_type": "default"})},
        )
    )
    ours = inverse_frequencies(rope)
    assert ours.dtype == torch.float32 and torch.equal(ours, theirs.inv_freq)
    assert attention_scaling(rope) == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("scaling", [s for s in SCALINGS.values() if s], ids=[n for n, s in SCALINGS.items() if s])
def test_both_spellings_say_the_same(scaling: dict[str, Any]) -> None:
    new = read_rope({"rope_parameters": {"rope_theta": 5e5, **scaling}}, 64, PATH)
    old = read_rope({"rope_theta": 5e5, "rope_scaling": scaling}, 64, PATH)
    oldest = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    assert new == old == read_rope({"rope_theta": 5e5, "rope_scaling": oldest}, 64, PATH)


@st.composite
def ropes(draw: st.DrawFn) -> RopeConfig:
    optional = st.none() | st.floats(min_value=0.1, max_value=10)
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    fields: dict[str, Any] = {
        "kind": kind,
        "theta": draw(st.floats(min_value=1.5, max_value=1e12)),
        "head_dim": 2 * draw(st.integers(1, 128)),
    }
    if kind != "default":
        fields["factor"] = draw(st.floats(min_value=1, max_value=64))
    if kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = draw(st.integers(1, 1 << 20))
    if kind == "llama3":
        fields["low_freq_factor"] = draw(st.floats(min_value=0.1, max_value=2))
        fields["high_freq_factor"] = draw(st.floats(min_value=2.5, max_value=8))
    if kind == "yarn":
        fields |= {"beta_fast": draw(st.floats(8, 64)), "beta_slow": draw(st.floats(0.5, 8))}
        fields |= {key: draw(optional) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        fields["truncate"] = draw(st.booleans())
    return RopeConfig(**fields)


@given(ropes())
def test_round_trip(rope: RopeConfig) -> None:
    assert read_rope({"rope_parameters": rope.to_dict()}, rope.head_dim, PATH) == rope


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model/config.json: rope_theta is required"),
        ({"rope_theta": -1}, "model/config.json: rope_theta is -1: must be positive"),
        ({"rope_theta": True}, "rope_theta is true: must be a number"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            'rope_scaling.rope_type is "dynamic": not supported; supported are default, linear, llama3, yarn',
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, 'rope_scaling.type is "longrope"'),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
            "rope_scaling.mrope_section is [16, 24, 24]: not a parameter of rope type 'default'",
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: rotating a part"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor is 0.25",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters differs by layer type",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters.rope_theta is 1000000.0: differs from the top-level rope_theta, 10000.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "linear", "factor": 2}},
            "rope_scaling is {",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is required"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "rope_scaling.factor is 0.5: must be at least 1",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings is required",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "rope_scaling.high_freq_factor is 1.0: must be above low_freq_factor, 1.0",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN | {"beta_fast": 0.5}},
            "rope_scaling.beta_fast is 0.5: must not be below beta_slow, 1.0",
        ),
    ],
)
def test_refuses(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_rope(config, 64, PATH)
    assert str(refusal.value).startswith("model/config.json: ")
    assert message in str(refusal.value)
