"""How a token is chosen from logits, the same for target and drafter, greedy and sampled.

The token at position p is argmax(filtered logits / T + Gumbel(seed, p, token id)), at T = 0 the plain argmax. The
choice depends on nothing else, so verification is a comparison, and output is a function of prompt, parameters and
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dflash_trt.ops.eager import gumbel
from dflash_trt.runtime.row_edits import RowEdit
from dflash_trt.runtime.sampling_params import SamplingParams as SamplingParams

IMPOSSIBLE = -2
"""What is chosen where edits leave no token."""


@dataclass(frozen=True)
class Sampling:
    """The parameters of B sequences side by side, each tensor [B]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    edits: tuple[Sequence[RowEdit], ...] = field(repr=False)
    logprobs: tuple[int | None, ...]
    """As in `SamplingParams`."""
    needs_rows: bool
    """Something looks at whole rows of logits; otherwise the best token of each part is all it takes."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], edits: Sequence[Sequence[RowEdit]]) -> Sampling:
        """Side by side, for parameters that `SamplingParams.each` gave."""
        reads = any(p.filters or p.logprobs is not None for p in params)
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64),
            top_k=torch.tensor([p.top_k for p in params]),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
            seeds=torch.tensor([p.seed for p in params]),
            edits=tuple(edits),
            logprobs=tuple(p.logprobs for p in params),
            needs_rows=reads or any(edits),
        )

    def of_rows(self, rows: Sequence[int]) -> Sampling:
        """Of some of the sequences."""
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in ("temperature", "top_k", "top_p", "min_p", "seeds")},
            edits=tuple(self.edits[row] for row in rows),
            logprobs=tuple(self.logprobs[row] for row in rows),
        )


def choose(logits: Tensor, positions: Tensor, sampling: Sampling, guesses: Tensor | None) -> Tensor:
    """Choose a token for every row.

    Args:
        logits: [B, R, V]
        positions: [B, R] the position that each row's token will have, on the CPU.
        guesses: [B, >= R - 1] tokens that are taken to precede the last row, all but the last the one before it, and so
            on, for edits; on the CPU. None: what is chosen for a row precedes the next one.

    Returns:
        [B, R] token ids on the CPU; of given guesses, `IMPOSSIBLE` where edits leave none.
    """
    edited = [row for row, edits in enumerate(sampling.edits) if edits]
    if edited:
        if guesses is None:
            return _choose_in_turn(logits, positions, sampling, edited)
        logits = logits.clone()
        for row in edited:
            for edit in sampling.edits[row]:
                logits[row] = edit.apply(logits[row], guesses[row])
    chosen = logits.argmax(-1)
    sampled = (sampling.temperature > 0).nonzero()[:, 0]
    if len(sampled) > 0:
        chosen[sampled] = _draw(logits[sampled], positions[sampled], sampling, sampled)
    for row in edited:
        chosen[row, logits[row].isneginf().all(-1)] = IMPOSSIBLE
    return chosen.cpu()


def _choose_in_turn(logits: Tensor, positions: Tensor, sampling: Sampling, edited: Sequence[int]) -> Tensor:
    """`choose` where edits of the sequences `edited` see what was chosen for the rows before."""
    unedited = replace(sampling, edits=((),) * len(logits))
    chosen = choose(logits, positions, unedited, None)
    part, so_far = sampling.of_rows(edited), chosen[edited][:, :0]
    for row in range(logits.shape[1]):
        here = slice(row, row + 1)
        # Where none is possible any is as good a guess as another.
        best = choose(logits[edited, here], positions[edited, here], part, so_far).clamp(min=0)
        so_far = torch.cat((so_far, best), dim=1)
    chosen[edited] = so_far
    return chosen


def choose_in_part(logits: Tensor, positions: Tensor, sampling: Sampling, first: int) -> tuple[Tensor, Tensor]:
    """The best token of a part of the vocabulary for every row, under parameters that need no whole rows.

    The best of all parts, the first of them where several are, is what `choose` chooses.

    Args:
        logits: [B, R, P] of tokens `first`..`first` + P - 1.
        positions: [B, R] as for `choose`.

    Returns:
        [B, R] what argmax compares, in float64, and [B, R] token ids, on the device of the logits.
    """
    scores, ids = logits.max(-1)
    scores = scores.double()
    sampled = (sampling.temperature > 0).nonzero()[:, 0]
    if len(sampled) > 0:
        noised = _noised(_tempered(logits[sampled], sampling, sampled), positions[sampled], sampling, sampled, first)
        best = noised.max(-1)
        scores[sampled], ids[sampled] = best.values.double(), best.indices
    return scores, ids + first


def _draw(logits: Tensor, positions: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """Sample [n, R] from logits [n, R, V] of the sequences `rows` [n], all of which have a temperature."""
    scaled = _tempered(logits, sampling, rows)
    device, dtype = scaled.device, scaled.dtype
    min_p = sampling.min_p[rows].to(device, dtype)[:, None, None]
    top_k, top_p = (part[rows].to(device)[:, None, None] for part in (sampling.top_k, sampling.top_p))
    if bool((min_p > 0).any()):
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
    if bool(((top_k > 0) | (top_p < 1)).any()):
        scaled = scaled.masked_fill(scaled < _threshold(scaled, top_k, top_p), float("-inf"))
    return _noised(scaled, positions, sampling, rows).argmax(-1)


def _tempered(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """Logits over temperature, in float32 or wider, of the sequences `rows`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / sampling.temperature[rows].to(logits.device, dtype)[:, None, None]


def _noised(scaled: Tensor, positions: Tensor, sampling: Sampling, rows: Tensor, first: int = 0) -> Tensor:
    """[n, R, P] for tokens `first`.., the noise of the sequences `rows` added."""
    device = scaled.device
    seeds = sampling.seeds[rows].to(device)[:, None].expand_as(positions)
    noise: Tensor = gumbel(seeds, positions.to(device), scaled.shape[-1], scaled.dtype, first)
    return scaled + noise


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least value [n, R, 1] that top-k and then top-p keep; -inf where neither cuts.

    Sorting whole vocabularies is slow and rarely needed: the largest 1,024 values settle nearly every row. It is a
    threshold, not a set of indices, so that tokens of equal probability are all kept or all dropped, in whatever order
    a sort has them.
    """
    vocab_size = scaled.shape[-1]
    top_k = torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size))
    threshold, settled = _cut(scaled, scaled.topk(min(1024, vocab_size)).values, top_k, top_p)
    if bool(settled.all()):
        return threshold
    return torch.where(settled, threshold, _cut(scaled, scaled.topk(vocab_size).values, top_k, top_p)[0])


def _cut(scaled: Tensor, largest: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold as far as the `largest` values of each row, in falling order, tell; and whether they tell all."""
    vocab_size, size = scaled.shape[-1], largest.shape[-1]
    within = top_k <= size
    kth = largest.gather(-1, (top_k.clamp(max=size) - 1).expand(*largest.shape[:-1], 1))
    kth = torch.where(within & (top_k < vocab_size), kth, float("-inf"))
    weights = (largest - largest[..., :1]).exp().double() * (largest >= kth)
    mass = (scaled - largest[..., :1]).exp().sum(-1, keepdim=True, dtype=torch.float64)
    total = torch.where(kth > float("-inf"), weights.sum(-1, keepdim=True), mass)
    before = weights.cumsum(-1) - weights
    kept = (largest >= kth) & (before < torch.where(top_p < 1, top_p * total, float("inf")))
    # None is kept where no token is possible, as of a drafter whose own vocabulary has none that a grammar allows.
    threshold = largest.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp(min=0))
    cuts = (top_k < vocab_size) | (top_p < 1)
    # Settled when what lies beyond the largest values is certainly dropped.
    settled = ((within | (top_k == vocab_size)) & (largest[..., -1:] < torch.maximum(threshold, kth))) | ~cuts
    return torch.where(cuts, threshold, float("-inf")), settled
