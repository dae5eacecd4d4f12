"""The network lowering: every operation of the vocabulary as TensorRT's own layers.

A model's calls are recorded in a strongly typed `INetworkDefinition` of `tensorrt` or `tensorrt_rtx`, which have one
API. Weights are torch tensors whose memory the constants point to; a weight that the engine is given when it runs is a
network input instead, and a model cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable, Span
from dflash_trt.ops.tensorrt_layers import Layers, NetworkTensor
from dflash_trt.ops.tensorrt_linear import network_linear

UPDATED = ".updated"
"""What the name of a cache's output adds to that of its input; both are bound to one buffer."""


@dataclass(frozen=True, kw_only=True)
class NetworkSpan(Span):
    """A span whose lengths are network inputs, each int32 [B]; `extent` is all positions of the caches."""

    kv_len: Any
    """Positions before the first row."""
    q_len: Any
    """Rows that count."""


@dataclass(frozen=True, kw_only=True)
class RotaryRows(RotaryTable):
    """Whole tables, and the rows that a pass takes of them.

    The numbers are rounded to the engine's type, as models are trained with them, and held in float32, which is what
    networks and kernels rotate in.
    """

    positions: Any
    """[B, T]"""


class TensorRTOps:
    """`Ops` as layers of one network, which is a rank's.

    Row i of a pass is slot i: caches are inputs [B, KV heads, positions, d], of the type of the keys.

    Args:
        trt: the module, `tensorrt` or `tensorrt_rtx`.
        network: what the layers are added to.
        rank, ranks: which part of the vocabulary is this rank's, and how many sum.
    """

    def __init__(self, trt: Any, network: Any, *, rank: int = 0, ranks: int = 1) -> None:
        self.layers = Layers(trt, network)
        self.rank = rank
        self.ranks = ranks

    def embedding(self, ids: NetworkTensor, table: Any) -> NetworkTensor:
        """See `Ops.embedding`."""
        layers, table = self.layers, self.layers.tensor(table)
        if self.ranks == 1:
            return layers.gather(table, ids, 0)
        part = int(table.shape[0])
        rows = layers.subtract(ids, layers.integers([[self.rank * part]]))
        here = layers.both(
            layers.greater(rows, layers.integers([[-1]])), layers.greater(layers.integers([[part]]), rows)
        )
        found = layers.gather(table, layers.select(here, rows, layers.integers([[0]])), 0)
        nothing = layers.number(0.0, found)
        return self.all_reduce(layers.select(layers.unsqueeze(here, 2), found, nothing))

    def linear(self, x: NetworkTensor, linear: Linear) -> NetworkTensor:
        """See `Ops.linear`."""
        return network_linear(self.layers, x, linear)

    def all_reduce(self, x: NetworkTensor) -> NetworkTensor:
        """See `Ops.all_reduce`."""
        return x if self.ranks == 1 else self.layers.all_reduce(x, self.ranks)

    def rms_norm(self, x: NetworkTensor, weight: torch.Tensor, eps: float) -> NetworkTensor:
        """In float32, rounded once."""
        layers = self.layers
        wide = layers.wide(x)
        mean = layers.mean_of_last(layers.multiply(wide, wide))
        root = layers.sqrt(layers.add(mean, layers.number(eps, wide)))
        scale = layers.wide(layers.constant(weight.view(*(1,) * (len(x.shape) - 1), -1)))
        return layers.cast(layers.multiply(layers.divide(wide, root), scale), x.dtype)

    def add(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """See `Ops.add`."""
        return self.layers.add(a, b)

    def scale(self, x: NetworkTensor, factor: float) -> NetworkTensor:
        """See `Ops.scale`."""
        return self.layers.multiply(x, self.layers.number(factor, x))

    def swiglu(self, gate: NetworkTensor, up: NetworkTensor) -> NetworkTensor:
        """See `Ops.swiglu`."""
        layers = self.layers
        wide = layers.wide(gate)
        return layers.multiply(layers.cast(layers.multiply(wide, layers.sigmoid(wide)), up.dtype), up)

    def soft_cap(self, x: NetworkTensor, cap: float) -> NetworkTensor:
        """See `Ops.soft_cap`."""
        layers = self.layers
        size = layers.number(cap, x)
        return layers.multiply(layers.tanh(layers.divide(x, size)), size)

    def concat(self, parts: Sequence[NetworkTensor]) -> NetworkTensor:
        """See `Ops.concat`."""
        return self.layers.concat_last(parts)

    def rows(self, x: NetworkTensor, start: int, end: int) -> NetworkTensor:
        """See `Ops.rows`."""
        return self.layers.gather(x, self.layers.integers(list(range(start, end))), 1)

    def select_rows(self, x: NetworkTensor, indices: NetworkTensor) -> NetworkTensor:
        """See `Ops.select_rows`."""
        return self.layers.gather_rows(x, indices)

    def split_heads(self, x: NetworkTensor, head_dim: int) -> Any:
        """See `Ops.split_heads`."""
        heads = int(x.shape[2]) // head_dim
        return self.layers.shuffle(x, shape=(0, 0, heads, head_dim), then=(0, 2, 1, 3))

    def merge_heads(self, x: Any) -> NetworkTensor:
        """See `Ops.merge_heads`."""
        return self.layers.shuffle(x, first=(0, 2, 1, 3), shape=(0, 0, int(x.shape[1] * x.shape[3])))

    def rotary_rows(self, table: RotaryTable, span: Span) -> RotaryRows:
        """See `Ops.rotary_rows`."""
        cos, sin = (self.layers.constant(part.float()) for part in (table.cos, table.sin))
        return RotaryRows(cos, sin, positions=span.positions)

    def rotary_embedding(self, x: Any, rotary: RotaryTable) -> Any:
        """In float32, rounded once."""
        assert isinstance(rotary, RotaryRows)
        rotated = self.layers.rotary(self.layers.wide(x), rotary.cos, rotary.sin, rotary.positions)
        return self.layers.cast(rotated, x.dtype)

    def kv_cache_update(self, cache: LayerCache, keys: Any, values: Any, span: Span) -> LayerCache:
        """See `Ops.kv_cache_update`; rows past the end of the caches are dropped."""
        assert isinstance(span, NetworkSpan)
        keys, values = self._marked(keys, values)
        return LayerCache(
            self._updated(cache.keys, keys, span.kv_len), self._updated(cache.values, values, span.kv_len)
        )

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> Any:
        """Boolean [B, 1, T, positions]."""
        layers = self.layers
        assert isinstance(span, NetworkSpan)
        key = layers.integers([[[list(range(span.extent))]]])
        row = layers.unsqueeze(span.positions, 1, 3)
        end = row if causal else layers.unsqueeze(self._last(span), 1, 2, 3)
        visible = layers.negate(layers.greater(key, end))
        if window is not None:
            reach = layers.integers([[[[window]]]])
            near = layers.greater(reach, layers.absolute(layers.subtract(row, key)))
            visible = layers.both(visible, near)
        return visible

    def attention(self, q: Any, cache: LayerCache, span: Span, mask: Any) -> Any:
        """TensorRT scales no scores, so the queries are; `key_value_lengths` says where it may stop reading."""
        layers = self.layers
        assert isinstance(span, NetworkSpan)
        scaled = layers.multiply(q, layers.number(1 / math.sqrt(int(q.shape[3])), q))
        length = layers.add(span.kv_len, span.q_len)
        return layers.attention(scaled, cache.keys, cache.values, mask, length)

    def expand_vocabulary(self, logits: NetworkTensor, offsets: torch.Tensor, vocab_size: int) -> NetworkTensor:
        """See `Ops.expand_vocabulary`."""
        layers = self.layers
        tokens = offsets + torch.arange(len(offsets))
        rows, known = torch.zeros(vocab_size, dtype=torch.int32), torch.zeros(vocab_size, dtype=torch.bool)
        rows[tokens], known[tokens] = torch.arange(len(offsets), dtype=torch.int32), True
        spread = layers.gather(logits, layers.constant(rows), 2)
        return layers.select(layers.constant(known.view(1, 1, -1)), spread, layers.number(-math.inf, logits))

    def _last(self, span: NetworkSpan) -> NetworkTensor:
        """[B] position of the last row that counts."""
        layers = self.layers
        return layers.subtract(layers.add(span.kv_len, span.q_len), layers.integers([1]))

    def _marked(self, keys: NetworkTensor, values: NetworkTensor) -> tuple[NetworkTensor, NetworkTensor]:
        """Keys NaN and values zero where a head's are not finite."""
        layers = self.layers
        both = layers.wide(layers.concat_last([keys, values]))
        # Finite over infinity is zero, all else NaN; a product with zero might be simplified.
        mark = layers.mean_of_last(layers.divide(both, layers.number(math.inf, both)))
        is_finite = layers.equal(mark, layers.number(0.0, mark))
        nothing, nan = (layers.number(number, keys) for number in (0.0, math.nan))
        return layers.select(is_finite, keys, nan), layers.select(is_finite, values, nothing)

    def _updated(self, cache: NetworkTensor, rows: NetworkTensor, starts: NetworkTensor) -> NetworkTensor:
        updated = self.layers.kv_cache_update(cache, rows, starts)
        return self.layers.output(updated, cache.name + UPDATED)
