"""What a conversion cost a target on text: both targets read the same tokens, each is asked for the next one.

They run as they are served: quantized activations where the format has them, keys and values read back from a cache
that is FP8 where the checkpoint says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.checkpoint.open_checkpoint import TargetCheckpoint
from dflash_trt.errors import UserError
from dflash_trt.models.decoder import DecoderLayer
from dflash_trt.models.llama import TargetWeights
from dflash_trt.models.pair import FAMILIES, load_target
from dflash_trt.models.rotary import rotary_table
from dflash_trt.models.weights import CheckpointLoader
from dflash_trt.ops.base import LayerCache, RotaryTable, Span
from dflash_trt.ops.torch_ops import TorchOps

_HEAD_ROWS = 64
"""Rows of logits that are compared at once, in float64 over the whole vocabulary."""
_PASS_ROWS = 8 * _HEAD_ROWS
"""Tokens that go through a target at once: every pass decodes all packed weights anew."""


@dataclass(frozen=True)
class TextQuality:
    """Both targets over all tokens of a text but each sample's first, which nothing comes before.

    Attributes:
        samples: that were read.
        tokens: that were predicted.
        original_perplexity, converted_perplexity: exp of the mean negative log-likelihood of a token, in nats.
        greedy_agreement: share of the tokens before which both targets have the same likeliest token.
        mean_kl_divergence: KL(original || converted) of the next token's distribution, in nats, the mean over tokens.
    """

    samples: int
    tokens: int
    original_perplexity: float
    converted_perplexity: float
    greedy_agreement: float
    mean_kl_divergence: float


@torch.inference_mode()
def compare_on_text(
    original: TargetCheckpoint,
    converted: TargetCheckpoint,
    samples: Sequence[Sequence[int]],
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> TextQuality:
    """Run both targets over every sample, each token given all true ones before it; sums are in float64.

    Args:
        original, converted: of one vocabulary.
        samples: token ids inside it, two or more each.
        dtype: to compute in; packed weights and FP8 caches stay what they are.
        advance: told of every sample, with 1, when it is done.

    Raises:
        UserError: a checkpoint is damaged, or its logits are not finite.
    """
    positions = max(map(len, samples))
    first, second = (_Reader.load(checkpoint, positions, dtype) for checkpoint in (original, converted))
    sums = torch.zeros(4, dtype=torch.float64)
    for ids in samples:
        predicted = torch.split(torch.tensor(ids[1:]), _HEAD_ROWS)
        for parts in zip(first.logits(ids[:-1]), second.logits(ids[:-1]), predicted, strict=True):
            sums += _sums(*parts)
        advance(1)
    tokens = sum(len(ids) - 1 for ids in samples)
    original_loss, converted_loss, agreement, divergence = (sums / tokens).tolist()
    return TextQuality(
        samples=len(samples),
        tokens=tokens,
        original_perplexity=math.exp(original_loss),
        converted_perplexity=math.exp(converted_loss),
        greedy_agreement=agreement,
        mean_kl_divergence=divergence,
    )


def _sums(original: Tensor, converted: Tensor, following: Tensor) -> Tensor:
    """Of logits [T, V] each, summed: both negative log-likelihoods of `following` [T], agreements, divergences; [4]."""
    p, q = (logits.double().log_softmax(-1) for logits in (original, converted))
    losses = [-log.gather(1, following[:, None]).sum() for log in (p, q)]
    agreements = (original.argmax(-1) == converted.argmax(-1)).sum()
    return torch.stack([*losses, agreements.double(), (p.exp() * (p - q)).sum()])


@dataclass(frozen=True)
class _Reader:
    """A target that reads one sample after the other into one slot."""

    checkpoint: TargetCheckpoint
    weights: TargetWeights
    rotary: RotaryTable
    caches: Sequence[LayerCache]

    @classmethod
    def load(cls, checkpoint: TargetCheckpoint, positions: int, dtype: torch.dtype) -> _Reader:
        config = checkpoint.config
        weights = load_target(CheckpointLoader(checkpoint.weights, lambda tensor: tensor, dtype), config)
        shape = (1, config.num_key_value_heads, positions, config.head_dim)
        return cls(
            checkpoint,
            weights,
            rotary_table(config.rope, positions, dtype, torch.device("cpu")),
            [_cache(layer, shape, dtype) for layer in weights.layers],
        )

    def logits(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The logits after every token of a sample, `_HEAD_ROWS` rows [T, V] at a time."""
        config = self.checkpoint.config
        quantization = config.quantization
        ops = TorchOps(quantizes_activations=quantization is not None and quantization.quantizes_activations)
        for start in range(0, len(ids), _PASS_ROWS):
            tokens = torch.tensor([ids[start : start + _PASS_ROWS]])
            end = start + tokens.shape[1]
            span = Span(torch.tensor([0]), torch.arange(start, end)[None], end, slice(0, 1))
            hidden, _ = FAMILIES[config.architecture].forward(
                ops, config, self.weights, tokens, self.caches, span, self.rotary, ()
            )
            for rows in hidden[0].split(_HEAD_ROWS):
                logits: Tensor = ops.linear(rows, self.weights.head)
                if not bool(logits.isfinite().all()):
                    raise UserError(f"{self.checkpoint.path}: its logits are not finite; the checkpoint is damaged")
                yield logits


def _cache(layer: DecoderLayer, shape: tuple[int, ...], dtype: torch.dtype) -> LayerCache:
    keys, values = (
        torch.zeros(shape, dtype=dtype if scale is None else torch.float8_e4m3fn)
        for scale in (layer.k_scale, layer.v_scale)
    )
    return LayerCache(keys, values, layer.k_scale, layer.v_scale)
