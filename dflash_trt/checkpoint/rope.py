"""Rotary position embedding: what a config says about it, and the frequencies that follow.

The formulas are those of `transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS`, in float32 and in the same order of
operations: an angle is a frequency times a position, so far into a context a last bit counts a thousandfold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.sizes import check_sizes
from dflash_trt.errors import UserError

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_KEYS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
_KEYS_OF_EVERY_KIND = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
LARGEST_THETA = 1e15
_LEAST_SCALING = 1e-3
"""Of cosines and sines, and its inverse the most: models have 1 to 2, and float16 holds these a hundredfold."""


@dataclass(frozen=True)
class RopeConfig:
    """One model's rotary embedding.

    Attributes:
        kind: which formula; `default` is the original one.
        theta: base of the geometric series of wavelengths.
        head_dim: width of a head, all of it rotated.
        factor: how many times the context was stretched; every kind but `default`.
        original_max_position_embeddings: tokens of context before stretching; llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3's band, in turns over the original context.
        beta_fast, beta_slow: yarn's band, in turns over the original context; 32 and 1 unless given.
        attention_factor: yarn's multiplier on cos and sin; derived from `factor` where None.
        mscale, mscale_all_dim: used in that derivation where both are given.
        truncate: yarn rounds its band outwards to whole dimensions.
    """

    kind: RopeKind
    theta: float
    head_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Refuse values that the formulas make no embedding of.

        Raises:
            UserError: a frequency is not positive and finite, or the factor on cosines and sines is out of range.
        """
        check_sizes(self)
        if not 1 < self.theta <= LARGEST_THETA:
            raise UserError(f"rope_theta is {self.theta}, it must be above 1, at most {LARGEST_THETA:g}")
        try:
            frequencies, scaling = inverse_frequencies(self), attention_scaling(self)
            usable = bool((torch.isfinite(frequencies) & (frequencies > 0)).all())
        except (ArithmeticError, ValueError):  # a division by zero, or a logarithm of nothing
            usable = False
        if not usable:
            raise UserError(f"rope type {self.kind!r} has no frequencies with {self._told()}")
        if not _LEAST_SCALING <= scaling <= 1 / _LEAST_SCALING:
            raise UserError(
                f"rope type {self.kind!r} multiplies cosines and sines by {scaling:g} with {self._told()}; it must be "
                f"{_LEAST_SCALING:g} to {1 / _LEAST_SCALING:g}"
            )

    def _told(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.to_dict().items() if key != "rope_type")

    def to_dict(self) -> dict[str, Any]:
        """The value of `rope_parameters` in a transformers 5 config; `read_rope` reads it back unchanged."""
        parameters: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        for key in sorted(_KEYS[self.kind]):
            value = getattr(self, key)
            if value is not None:
                parameters[key] = value
        return parameters


def read_rope(config: dict[str, Any], head_dim: int, path: Path, name: str = "") -> RopeConfig:
    """Read the rotary embedding of a config in transformers 5's spelling (`rope_parameters`) or 4's.

    Transformers 4 has `rope_theta` at the top and an optional `rope_scaling`, whose kind is `rope_type` or,
    in old files, `type`; absent scaling means the default kind. `rope_theta` itself is required.

    Args:
        config: the object that holds those keys.
        head_dim: width of a head.
        path: the file, for messages.
        name: where the object is inside the file, for messages; empty for the top.

    Raises:
        UserError: a kind, key or value that is not supported, or two places that disagree.
    """
    top = JsonObject(config, path, name)
    spelling = "rope_parameters" if "rope_parameters" in top else "rope_scaling"
    if "rope_parameters" in top and "rope_scaling" in top and top.values["rope_scaling"] != top.values[spelling]:
        raise top.error("rope_scaling", "differs from rope_parameters; keep one of them")
    rope = top.object(spelling) if spelling in top else JsonObject({}, path, top.key(spelling))

    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in top and key in rope and top.values[key] != rope.values[key]:
            raise rope.error(key, f"differs from the top-level {key}, {top.values[key]}; keep one of them")
    for place in (top, rope):
        if "partial_rotary_factor" in place and place.positive("partial_rotary_factor") != 1:
            raise place.error("partial_rotary_factor", "rotating a part of the head is not supported")

    kind = _read_kind(rope)
    unused = sorted(key for key in rope.values if key in rope and key not in _KEYS[kind] | _KEYS_OF_EVERY_KIND)
    if unused:
        raise rope.error(unused[0], f"not a parameter of rope type {kind!r}; remove it if it has no effect")
    theta = (rope if "rope_theta" in rope else top).positive("rope_theta", LARGEST_THETA)
    fields = _read_fields(top, rope, kind)
    try:
        return RopeConfig(kind, theta, head_dim, **fields)
    except UserError as error:
        raise UserError(f"{path}: {rope.name}: {error}") from None


def _read_fields(top: JsonObject, rope: JsonObject, kind: RopeKind) -> dict[str, Any]:
    """What a `RopeConfig` of this kind has beside the base."""
    if kind == "default":
        return {}
    factor = rope.positive("factor")
    if factor < 1:
        raise rope.error("factor", "must be at least 1")
    if kind == "linear":
        return {"factor": factor}
    original = (rope if "original_max_position_embeddings" in rope else top).size("original_max_position_embeddings")
    fields: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": original}
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"must be above low_freq_factor, {low}")
        return {**fields, "low_freq_factor": low, "high_freq_factor": high}
    return {**fields, **_read_yarn(rope)}


def _read_kind(rope: JsonObject) -> RopeKind:
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise UserError(f"{rope.path}: {rope.name} differs by layer type, which is not supported: use one for all")
    spelling = "rope_type" if "rope_type" in rope else "type"
    kind = rope.text(spelling) if spelling in rope else "default"
    if kind not in get_args(RopeKind):
        raise rope.error(spelling, f"not supported; supported are {', '.join(get_args(RopeKind))}")
    return cast(RopeKind, kind)


def _read_yarn(rope: JsonObject) -> dict[str, Any]:
    def optional(key: str) -> float | None:
        return rope.positive(key) if key in rope else None

    beta_fast, beta_slow = optional("beta_fast") or 32.0, optional("beta_slow") or 1.0
    if beta_fast < beta_slow:
        raise rope.error("beta_fast", f"must not be below beta_slow, {beta_slow}")
    return {
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "attention_factor": optional("attention_factor"),
        "mscale": optional("mscale"),
        "mscale_all_dim": optional("mscale_all_dim"),
        "truncate": rope.boolean("truncate", absent=True),
    }


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians that each pair of dimensions turns per position: [head_dim / 2], float32, bit for bit transformers'."""
    periods = rope.theta ** (torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim)
    plain = 1 / periods
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        kept = _llama3_kept(rope, plain)
        return (1 - kept) * plain / rope.factor + kept * plain
    kept = _yarn_kept(rope)
    return (1 - kept) * (1 / (rope.factor * periods)) + kept * plain


def attention_scaling(rope: RopeConfig) -> float:
    """The factor on cos and sin: YaRN's, 1 for every other kind."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _llama3_kept(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """How much of each frequency stays unstretched: a ramp in its turns over the original context."""
    assert rope.original_max_position_embeddings is not None
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    turns = rope.original_max_position_embeddings / (2 * math.pi / plain)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _yarn_kept(rope: RopeConfig) -> torch.Tensor:
    """How much of each frequency stays unstretched: a ramp over dimensions, between the two betas."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension(turns: float) -> float:
        return rope.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # as published: a ramp needs some width
    ramp = (torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)
