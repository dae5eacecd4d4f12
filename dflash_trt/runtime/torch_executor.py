"""The executor of the torch backend, and the reference for all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt.models.decoder import DecoderLayer, LayerConfig
from dflash_trt.models.pair import Caches, Pair
from dflash_trt.models.sharding import kv_heads
from dflash_trt.ops.base import LayerCache, Span
from dflash_trt.ops.eager import eager_ops
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.runtime.parallel_choice import choose_among_ranks, not_finite, verify_among_ranks
from dflash_trt.runtime.sampling import Sampling, choose
from dflash_trt.runtime.step import Step, Verified


class TorchExecutor:
    """Runs a pair, or a rank's part of one, on one device; its caches are allocated once.

    Of several ranks, all must be given the same calls in the same order. Each returns the same, with one exception:
    where a step has edits or filters, only rank 0 needs them, and only its drafts are looked at.
    """

    def __init__(
        self, pair: Pair, *, max_batch_size: int, max_seq_len: int, max_num_tokens: int, ranks: Ranks = ALONE
    ) -> None:
        self.pair = pair
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max_num_tokens
        self.block_size = pair.drafter.block_size
        quantization = pair.target.quantization
        norm = pair.target_weights.norm
        self._ops = eager_ops(
            norm.device,
            norm.dtype,
            quantizes_activations=quantization is not None and quantization.quantizes_activations,
            ranks=ranks,
        )
        self._ranks = ranks
        self._device = norm.device
        self._caches = Caches(
            self._allocate(pair.target, pair.target_weights.layers),
            self._allocate(pair.drafter, pair.drafter_weights.layers),
        )

    @torch.inference_mode()
    def verify(self, step: Step) -> Verified:
        """See `Executor.verify`."""
        span = self._span(step.slots, step.kv_len, step.tokens.shape[1])
        logits = self.pair.target_pass(
            self._ops, step.tokens.to(self._device), step.logit_rows.to(self._device), self._caches, span
        )
        verified = verify_among_ranks(self._ranks, logits, self.pair.target.vocab_size, step)
        return verified.with_errors(not_finite(logits.dtype))

    @torch.inference_mode()
    def draft(self, anchors: Tensor, kv_len: Tensor, slots: Tensor, sampling: Sampling, count: int) -> Tensor:
        """See `Executor.draft`."""
        block = torch.full((len(anchors), self.block_size), self.pair.drafter.mask_token_id)
        block[:, 0] = anchors
        span = self._span(slots, kv_len, self.block_size)
        logits = self.pair.drafter_pass(self._ops, block.to(self._device), count, self._caches, span)
        positions = kv_len[:, None] + torch.arange(1, 1 + count)
        if self.pair.drafter_weights.head is not None:  # which every rank has whole
            return choose(logits, positions, sampling, guesses=None)
        return choose_among_ranks(self._ranks, logits, self.pair.target.vocab_size, positions, sampling, guesses=None)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Executor.move_slot`."""
        for layer in (*self._caches.target, *self._caches.drafter):
            for cache in (layer.keys, layer.values):
                cache[destination, :, :length] = cache[source, :, :length]

    def _allocate(self, config: LayerConfig, layers: Sequence[DecoderLayer]) -> Sequence[LayerCache]:
        positions = self.max_seq_len + self.block_size
        heads = kv_heads(config.num_key_value_heads).share(self._ranks.size)
        shape = (self.max_batch_size, heads, positions, config.head_dim)

        def zeros(scale: Tensor | None) -> Tensor:
            dtype = self.pair.target_weights.norm.dtype if scale is None else torch.float8_e4m3fn
            return torch.zeros(shape, dtype=dtype, device=self._device)

        return [
            LayerCache(zeros(layer.k_scale), zeros(layer.v_scale), layer.k_scale, layer.v_scale) for layer in layers
        ]

    def _span(self, slots: Tensor, starts: Tensor, rows: int) -> Span:
        first, count = int(slots[0]), len(slots)
        in_order = bool((slots == torch.arange(first, first + count)).all())
        return Span(
            slots=slots.to(self._device),
            positions=(starts[:, None] + torch.arange(rows)).to(self._device),
            extent=int(starts.max()) + rows,
            slot_range=slice(first, first + count) if in_order else None,
        )
