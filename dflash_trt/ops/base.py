"""The vocabulary that models are written in.

A model calls these operations and nothing else, so one definition serves every lowering: `TorchOps` runs it at once, a
network builder records it. Shapes use B sequences, T rows a sequence, D hidden size, H heads, d head size. Under tensor
parallelism a rank's weights are its part of the model's; only `embedding` and `all_reduce` know that there are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_trt.quantization.fp8 import FP8Tensor
from dflash_trt.quantization.nvfp4 import NVFP4Tensor

Tensor = Any
"""A `torch.Tensor` under `TorchOps`; a network's tensor in other lowerings. Models never look inside."""

Mask = Any
"""Which keys each row may see, made by `Ops.attention_mask` once a pass and shared by all layers of its kind."""


@dataclass(frozen=True)
class Linear:
    """A linear layer's weight [out, in] and, where it has one, its bias [out].

    A weight carries its own quantization: where it has an `input_scale`, what it is multiplied with is quantized to the
    weight's format first; where it has none, that stays as it is.
    """

    weight: Tensor | FP8Tensor | NVFP4Tensor
    bias: Tensor | None = None
    input_scale: Tensor | None = None
    """Float32 scalar, only beside a quantized weight: amax / 448 of the activations for FP8, / (6 * 448) for NVFP4."""


@dataclass(frozen=True)
class Span:
    """Where the rows of a pass stand: row t of sequence i at `positions[i, t]` of slot `slots[i]`."""

    slots: Tensor
    """[B] the cache slot of each sequence."""
    positions: Tensor
    """[B, T], T in a row for each sequence; its slot's cache holds all before them."""
    extent: int
    """One past the last position of any row: no key beyond it exists in this pass."""
    slot_range: slice | None = None
    """The same slots as a range, where they are consecutive: the caches are then read in place."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values, each [slots, KV heads, positions, d].

    With scales they are float8_e4m3fn, and stand for themselves times their scale.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    """Float32 scalar."""
    value_scale: Tensor | None = None


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines of every position, each [positions, d / 2], already times the scaling of YaRN."""

    cos: Tensor
    sin: Tensor


class Ops(Protocol):
    """The operations. Names are the field's; each lowering keeps these shapes and meanings."""

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of a table [V, D] at `ids` [B, T] -> [B, T, D]; `table` is this rank's part of its rows."""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[..., in] -> [..., out]; weight and activations as `Linear` says."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, the same to the bit on all of them."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; the mean is taken in float32 or wider."""

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise sum of two tensors of one shape."""

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x times a constant."""

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """tanh(x / cap) * cap."""

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Join along the last axis."""

    def rows(self, x: Tensor, start: int, end: int) -> Tensor:
        """Rows `start`..`end` - 1 of every sequence: [B, T, D] -> [B, end - start, D]."""

    def select_rows(self, x: Tensor, indices: Tensor) -> Tensor:
        """Rows `indices` [B, R] of x [B, T, D] -> [B, R, D]."""

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        """[B, T, H * d] -> [B, H, T, d]."""

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, T, d] -> [B, T, H * d]."""

    def rotary_rows(self, table: RotaryTable, span: Span) -> RotaryTable:
        """The table's rows at the span's positions, in the form `rotary_embedding` takes."""

    def rotary_embedding(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Rotate x [B, H, T, d] by its positions; NeoX pairing (i, i + d / 2)."""

    def kv_cache_update(self, cache: LayerCache, keys: Tensor, values: Tensor, span: Span) -> LayerCache:
        """Write keys and values [B, KV heads, T, d] at the span's rows; the result holds them.

        A cache with scales holds e4m3(clip(k / key_scale, -448, 448)), and values likewise; what decides such a
        rounding is float32. Where a head's key or value is not finite, its key becomes NaN and its value zero: a row
        that sees it is NaN, and one that does not multiplies nothing but numbers.
        """

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> Mask:
        """Row at position p sees key k of its slot up to the last row, where k <= p if causal, |p - k| < window."""

    def attention(self, q: Tensor, cache: LayerCache, span: Span, mask: Mask) -> Tensor:
        """softmax(q k / sqrt(d)) v over the visible keys: [B, H, T, d] -> [B, H, T, d], H a multiple of KV heads.

        No other key or value has any part in it, finite or not.
        """

    def expand_vocabulary(self, logits: Tensor, offsets: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., R] of part of a vocabulary, row i for token i + `offsets[i]` -> [..., V], -inf elsewhere."""
