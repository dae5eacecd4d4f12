"""The network lowering with our plugin: caches written and read, and tokens chosen, by its kernels.

A kernel norms and rotates the heads that it writes or attends with. So what a model says about heads is kept until the
cache or the attention takes it, and no layer is added for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from dflash_trt.ops.base import LayerCache, RotaryTable, Span
from dflash_trt.ops.ranks import vocabulary_part
from dflash_trt.ops.tensorrt_layers import NetworkTensor
from dflash_trt.ops.tensorrt_ops import UPDATED, NetworkSpan, RotaryRows, TensorRTOps


class AddPlugin(Protocol):
    """Adds one of the plugin's operations to a network and gives its outputs."""

    def __call__(self, name: str, inputs: Sequence[NetworkTensor], **attributes: Any) -> list[NetworkTensor]: ...


@dataclass(frozen=True)
class Heads:
    """Heads as projected, [B, T, H * d], and what a kernel does to each."""

    x: NetworkTensor
    size: int
    norm: torch.Tensor | None = None
    eps: float = 0.0
    rotary: RotaryRows | None = None

    @property
    def count(self) -> int:
        """H"""
        return int(self.x.shape[2]) // self.size


@dataclass(frozen=True)
class PluginMask:
    """Which keys rows see; kernels know it from positions."""

    causal: bool
    window: int | None


@dataclass(frozen=True)
class Update:
    """Keys and values on their way into a cache."""

    cache: LayerCache
    keys: Heads
    values: Heads


class PluginOps(TensorRTOps):
    """`Ops` where caches are inputs [layers, slots, KV heads, positions, d], of one layer or of all.

    A cache of several layers is written once, when the last of them has its keys and values.

    Args:
        add_plugin: adds an operation to `network`.
        block_size: rows of a sequence in the passes that count, those that decode.
    """

    def __init__(
        self, trt: Any, network: Any, add_plugin: AddPlugin, block_size: int, *, rank: int = 0, ranks: int = 1
    ) -> None:
        super().__init__(trt, network, rank=rank, ranks=ranks)
        self._add_plugin = add_plugin
        self._block_size = block_size
        self._waiting: list[Update] = []

    def split_heads(self, x: NetworkTensor, head_dim: int) -> Heads:
        """See `Ops.split_heads`."""
        return Heads(x, head_dim)

    def merge_heads(self, x: NetworkTensor) -> NetworkTensor:
        """Attention gives [B, T, H, d]."""
        return self.layers.shuffle(x, (0, 0, int(x.shape[2] * x.shape[3])))

    def rms_norm(self, x: Any, weight: torch.Tensor, eps: float) -> Any:
        """See `Ops.rms_norm`."""
        if not isinstance(x, Heads):
            return super().rms_norm(x, weight, eps)
        if x.norm is not None or x.rotary is not None:
            raise ValueError("kernels norm heads once, before they are rotated")
        return replace(x, norm=weight, eps=eps)

    def rotary_embedding(self, x: Any, rotary: RotaryTable) -> Any:
        """See `Ops.rotary_embedding`."""
        if x.rotary is not None:
            raise ValueError("kernels rotate heads once")
        return replace(x, rotary=rotary)

    def kv_cache_update(self, cache: LayerCache, keys: Heads, values: Heads, span: Span) -> LayerCache:
        """See `Ops.kv_cache_update`."""
        self._waiting.append(Update(cache, keys, values))
        if len(self._waiting) < int(cache.keys.shape[0]):
            return cache
        updates, self._waiting = self._waiting, []
        return self._write(updates, span)

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> PluginMask:
        """See `Ops.attention_mask`."""
        return PluginMask(causal, window)

    def attention(self, q: Heads, cache: LayerCache, span: Span, mask: PluginMask) -> NetworkTensor:
        """-> [B, T, H, d]."""
        assert isinstance(span, NetworkSpan) and q.rotary is not None and int(cache.keys.shape[0]) == 1
        rows = self.layers.shuffle(q.x, (0, 0, q.count, q.size))
        shared = {"ratio": q.count // int(cache.keys.shape[2]), "most_rows": self._block_size}
        partial, lse = self._add_plugin(
            "block_attention_partial",
            [
                rows,
                self._norms([q]),
                q.rotary.cos,
                q.rotary.sin,
                span.kv_len,
                span.q_len,
                span.slots,
                self._scales([cache.key_scale]),
                self._scales([cache.value_scale]),
                cache.keys,
                cache.values,
            ],
            eps=q.eps,
            has_norm=q.norm is not None,
            causal=mask.causal,
            window=mask.window or 0,
            **shared,
        )
        sinks = self.layers.constant(torch.zeros(q.count))
        parts = [partial, lse, sinks, rows]
        return self._add_plugin("block_attention_combine", parts, has_sinks=False, **shared)[0]

    def verify(
        self,
        logits: NetworkTensor,
        tokens: NetworkTensor,
        draft_len: NetworkTensor,
        first: NetworkTensor,
        temperature: NetworkTensor,
        seeds: NetworkTensor,
        vocab_size: int,
        *,
        whole: bool = False,
    ) -> list[NetworkTensor]:
        """The target's tokens [B, v], how many draft tokens agree [B], and the token after those [B].

        Args:
            logits: [B, v, V] of this rank's tokens, or of all where `whole`.
            tokens: [B, v] the rows' own tokens: row j + 1's is what row j is compared with.
            draft_len: [B]
            first: [B] position of the token that row 0 chooses.
            temperature, seeds: [B]
            vocab_size: of the model; what lies beyond is padding.
        """
        offset, valid = vocabulary_part(0 if whole else self.rank, int(logits.shape[2]), vocab_size)
        numbers = (self.layers.integers([number]) for number in (valid, offset))
        best = self._add_plugin("verify_partial", [logits, temperature, seeds, first, *numbers])
        if self.ranks > 1 and not whole:
            best = [self._of_all_ranks(x) for x in best]
        return self._add_plugin("verify_combine", [*best, tokens, draft_len])

    def require_written(self) -> None:
        """To be called when a pass is recorded: layers of a cache of several must all have come."""
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} layers of {self._waiting[0].cache.keys.name} were never written")

    def _write(self, updates: Sequence[Update], span: Span) -> LayerCache:
        assert isinstance(span, NetworkSpan)
        cache, first = updates[0].cache, updates[0].keys
        keys, values = [each.keys for each in updates], [each.values for each in updates]
        like_first = all((each.eps, each.rotary) == (first.eps, first.rotary) for each in keys)
        same_norm = len({each.norm is None for each in keys}) == 1
        plain = all(each.norm is None and each.rotary is None for each in values)
        if first.rotary is None or not (like_first and same_norm and plain):
            raise ValueError("one write norms and rotates the keys of all its layers alike, and no values")
        written = self._add_plugin(
            "kv_write",
            [
                self._stacked(keys),
                self._stacked(values),
                self._norms(keys),
                first.rotary.cos,
                first.rotary.sin,
                span.kv_len,
                span.q_len,
                span.slots,
                self._scales([update.cache.key_scale for update in updates]),
                self._scales([update.cache.value_scale for update in updates]),
                cache.keys,
                cache.values,
            ],
            eps=first.eps,
            has_norm=first.norm is not None,
        )
        keys_out, values_out = (
            self.layers.output(x, given.name + UPDATED)
            for x, given in zip(written, (cache.keys, cache.values), strict=True)
        )
        return LayerCache(keys_out, values_out, cache.key_scale, cache.value_scale)

    def _stacked(self, heads: Sequence[Heads]) -> NetworkTensor:
        """[B, T, L, KV heads, d]"""
        joined = heads[0].x if len(heads) == 1 else self.layers.concat_last([each.x for each in heads])
        return self.layers.shuffle(joined, (0, 0, len(heads), heads[0].count, heads[0].size))

    def _norms(self, heads: Sequence[Heads]) -> NetworkTensor:
        """[L, d]; where heads have no norm nobody reads it."""
        unread = torch.ones(heads[0].size, dtype=self.layers.dtype(heads[0].x))
        return self.layers.constant(torch.stack([unread if each.norm is None else each.norm for each in heads]))

    def _scales(self, scales: Sequence[torch.Tensor | None]) -> NetworkTensor:
        """Float32 [L]; of a cache that is not quantized nobody reads them."""
        return self.layers.constant(torch.stack([torch.tensor(1.0) if each is None else each for each in scales]))

    def _of_all_ranks(self, x: NetworkTensor) -> NetworkTensor:
        """[B, v, C] of every rank -> [B, v, ranks * C]."""
        of_all = self.layers.all_gather(self.layers.unsqueeze(x, 0), self.ranks)
        return self.layers.shuffle(of_all, (0, 0, self.ranks * int(x.shape[2])), first=(1, 2, 0, 3))
