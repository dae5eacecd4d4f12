"""The torch backend's verifier and DFlash proposer, the reference for all others."""

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
from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.ngram import NgramProposer
from dflash_trt.runtime.parallel_choice import choose_among_ranks, not_finite, verify_among_ranks
from dflash_trt.runtime.proposer import Proposal, ProposerName, Sequences
from dflash_trt.runtime.sampling import choose
from dflash_trt.runtime.verifier import Step, Verified


def torch_executor(
    pair: Pair,
    *,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    ranks: Ranks = ALONE,
    proposer: ProposerName = "dflash",
) -> RankExecutor:
    """A pair, or a rank's part of one, ready to run on one device; its caches are allocated once.

    Under another proposer than DFlash's, the target's pass writes no context for the drafter.
    """
    model = TorchModel(pair, max_batch_size, max_seq_len, max_num_tokens, ranks)
    if proposer == "ngram":
        return RankExecutor(TorchVerifier(model, None), NgramProposer(pair.drafter.block_size - 1))
    context = model.allocate(pair.drafter, pair.drafter_weights.layers)
    return RankExecutor(TorchVerifier(model, context), TorchDFlash(model, context))


class TorchModel:
    """What the two passes of a pair share: weights, sizes, and the device."""

    def __init__(self, pair: Pair, max_batch_size: int, max_seq_len: int, max_num_tokens: int, ranks: Ranks) -> None:
        self.pair = pair
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.max_num_tokens = max_num_tokens
        self.ranks = ranks
        quantization, norm = pair.target.quantization, pair.target_weights.norm
        self.ops = eager_ops(
            norm.device,
            norm.dtype,
            quantizes_activations=quantization is not None and quantization.quantizes_activations,
            ranks=ranks,
        )
        self.device = norm.device

    def allocate(self, config: LayerConfig, layers: Sequence[DecoderLayer]) -> Sequence[LayerCache]:
        """Empty caches for all layers, each [slots, KV heads, positions, d]."""
        positions = self.max_seq_len + self.pair.drafter.block_size
        heads = kv_heads(config.num_key_value_heads).share(self.ranks.size)
        shape = (self.max_batch_size, heads, positions, config.head_dim)

        def zeros(scale: Tensor | None) -> Tensor:
            dtype = self.pair.target_weights.norm.dtype if scale is None else torch.float8_e4m3fn
            return torch.zeros(shape, dtype=dtype, device=self.device)

        return [
            LayerCache(zeros(layer.k_scale), zeros(layer.v_scale), layer.k_scale, layer.v_scale) for layer in layers
        ]

    def span(self, slots: Tensor, starts: Tensor, rows: int) -> Span:
        """So many rows of each slot, the first of them at `starts`."""
        first, count = int(slots[0]), len(slots)
        in_order = bool((slots == torch.arange(first, first + count)).all())
        return Span(
            slots=slots.to(self.device),
            positions=(starts[:, None] + torch.arange(rows)).to(self.device),
            extent=int(starts.max()) + rows,
            slot_range=slice(first, first + count) if in_order else None,
        )


class TorchVerifier:
    """Runs the target's pass, which writes the drafter's context too where a drafter runs.

    Args:
        context: the drafter's caches.
    """

    def __init__(self, model: TorchModel, context: Sequence[LayerCache] | None) -> None:
        self.max_batch_size = model.max_batch_size
        self.max_seq_len = model.max_seq_len
        self.max_num_tokens = model.max_num_tokens
        self.caches = Caches(model.allocate(model.pair.target, model.pair.target_weights.layers), context)
        self.model = model

    @torch.inference_mode()
    def verify(self, step: Step) -> Verified:
        """See `Verifier.verify`."""
        model = self.model
        span = model.span(step.slots, step.kv_len, step.tokens.shape[1])
        logits = model.pair.target_pass(
            model.ops, step.tokens.to(model.device), step.logit_rows.to(model.device), self.caches, span
        )
        verified = verify_among_ranks(model.ranks, logits, model.pair.target.vocab_size, step)
        return verified.with_errors(not_finite(logits.dtype))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Verifier.move_slot`."""
        _move_slot(self.caches.target, source, destination, length)


class TorchDFlash:
    """DFlash's proposer: the drafter's pass over the context that the target's passes have written.

    Args:
        context: the drafter's caches.
    """

    on_every_rank = True

    def __init__(self, model: TorchModel, context: Sequence[LayerCache]) -> None:
        self.max_draft_len = model.pair.drafter.block_size - 1
        self.model = model
        self._context = context

    @torch.inference_mode()
    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Proposer.propose`. A block is always drafted whole: a shorter one would hold other draft tokens."""
        model, pair, sampling = self.model, self.model.pair, sequences.sampling
        block = torch.full((len(sequences.anchors), pair.drafter.block_size), pair.drafter.mask_token_id)
        block[:, 0] = sequences.anchors
        span = model.span(sequences.slots, sequences.kv_len, pair.drafter.block_size)
        logits = pair.drafter_pass(model.ops, block.to(model.device), count, self._context, span)
        positions = sequences.kv_len[:, None] + torch.arange(1, 1 + count)
        if pair.drafter_weights.head is not None:  # which every rank has whole
            tokens = choose(logits, positions, sampling, guesses=None)
        else:
            tokens = choose_among_ranks(model.ranks, logits, pair.target.vocab_size, positions, sampling, guesses=None)
        return Proposal(tokens, torch.full_like(sequences.slots, count))

    def observe(self, step: Step, verified: Verified) -> None:
        """Nothing to learn: the target's pass has written the context."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Proposer.move_slot`."""
        _move_slot(self._context, source, destination, length)


def _move_slot(caches: Sequence[LayerCache], source: int, destination: int, length: int) -> None:
    for layer in caches:
        for cache in (layer.keys, layer.values):
            cache[destination, :, :length] = cache[source, :, :length]
