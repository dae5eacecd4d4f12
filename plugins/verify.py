"""`dflash::verify_partial` and `dflash::verify_combine`: from logits to accepted guesses and the token after them.

The token at position p is argmax(logits / T + Gumbel(seed, p, token id)), and at T = 0 the plain argmax; guesses are
accepted while they are the tokens chosen. Each rank takes the best of every chunk of its part of the vocabulary; ranks
exchange those, and all combine them. Logits never leave the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.plugins.kernel import cdiv
from dflash_trt.plugins.noise import gumbel
from dflash_trt.plugins.shapes import require_shapes
from dflash_trt.plugins.verify_kernels import CHUNK, verify_combine_kernel, verify_partial_kernel


def verify_partial(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first: Tensor,
    valid: Tensor,
    offset: Tensor,
    chunk: int = CHUNK,
    *,
    interpret: bool = False,
) -> tuple[Tensor, Tensor]:
    """The best token of every chunk of this rank's part of the vocabulary, for every row.

    Args:
        logits: [B, v, V] BF16, FP16 or float32.
        temperature: [B] float32; 0 is greedy.
        seeds: [B] int64
        first: [B] int32, the position that the token of row 0 will have; those of the others follow.
        valid: [1] int32, how many of the V tokens exist; those after them are padding.
        offset: [1] int32, the id of the first of the V tokens.
        interpret: on a CPU, the kernel in Triton's interpreter, not the reference.

    Returns:
        scores: [B, v, C] float32, the largest logit, or logit / T + noise; infinite where a logit is infinite or NaN.
        ids: [B, v, C] int32, the token that has it, the lowest of several.
    """
    require_shapes(
        "verify_partial",
        logits=(logits, "B v V"),
        temperature=(temperature, "B"),
        seeds=(seeds, "B"),
        first=(first, "B"),
        valid=(valid, "1"),
        offset=(offset, "1"),
    )
    batch, rows, tokens = logits.shape
    if not logits.is_cuda and not interpret:
        return verify_partial_reference(logits, temperature, seeds, first, valid, offset, chunk)
    scores = logits.new_empty((batch, rows, cdiv(tokens, chunk)), dtype=torch.float32)
    ids = torch.empty_like(scores, dtype=torch.int32)
    kernel = verify_partial_kernel(logits.dtype, tokens, chunk)
    kernel.launch(logits, temperature, seeds, first, valid, offset, batch, rows, scores, ids)
    return scores, ids


def verify_combine(
    scores: Tensor, ids: Tensor, tokens: Tensor, draft_len: Tensor, *, interpret: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The token of every row, and how many guesses agree with those.

    Args:
        scores, ids: [B, v, C] of all chunks of all ranks, as `verify_partial` gives them.
        tokens: [B, v] int32, the token before each row: from the second on they are guesses of the row before.
        draft_len: [B] int32, how many of them are guesses; 0..v - 1.
        interpret: as for `verify_partial`.

    Returns:
        chosen: [B, v] int32; -1 where a logit was infinite or NaN.
        accepted: [B] int32, the guesses before the first that differs.
        next: [B] int32, the token chosen after them.
    """
    require_shapes(
        "verify_combine",
        scores=(scores, "B v C"),
        ids=(ids, "B v C"),
        tokens=(tokens, "B v"),
        draft_len=(draft_len, "B"),
    )
    batch, rows, chunks = scores.shape
    if not scores.is_cuda and not interpret:
        return verify_combine_reference(scores, ids, tokens, draft_len)
    chosen = torch.empty_like(tokens)
    accepted, following = torch.empty_like(draft_len), torch.empty_like(draft_len)
    kernel = verify_combine_kernel()
    kernel.launch(scores, ids, tokens, draft_len, batch, rows, chunks, chosen, accepted, following)
    return chosen, accepted, following


def verify(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first: Tensor,
    tokens: Tensor,
    draft_len: Tensor,
    valid: int | None = None,
    chunk: int = CHUNK,
    *,
    interpret: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both on one rank: (chosen, accepted, next) of logits [B, v, V], of which `valid` tokens exist, or all."""
    exist = torch.full_like(draft_len[:1], logits.shape[-1] if valid is None else valid)
    offset = torch.zeros_like(exist)
    best = verify_partial(logits, temperature, seeds, first, exist, offset, chunk, interpret=interpret)
    return verify_combine(*best, tokens, draft_len, interpret=interpret)


def verify_partial_reference(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    first: Tensor,
    valid: Tensor,
    offset: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """`verify_partial` in torch."""
    _, rows, tokens = logits.shape
    columns = torch.arange(tokens, device=logits.device)
    score = (
        logits.float()
        .masked_fill(columns >= valid, float("-inf"))
        .nan_to_num(float("inf"), float("inf"), float("-inf"))
    )
    positions = first[:, None] + torch.arange(rows, device=logits.device)
    noise = gumbel(seeds[:, None].expand(positions.shape), positions, tokens, torch.float32, int(offset))
    heat = temperature[:, None, None]
    score = torch.where(heat > 0, score / torch.where(heat > 0, heat, 1.0) + noise, score)
    score = torch.nn.functional.pad(score, (0, -tokens % chunk), value=float("-inf")).unflatten(-1, (-1, chunk))
    best = score.max(-1)
    starts = torch.arange(0, tokens, chunk, device=logits.device)
    return best.values, (offset + starts + best.indices).int()


def verify_combine_reference(
    scores: Tensor, ids: Tensor, tokens: Tensor, draft_len: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_combine` in torch."""
    best = scores.amax(-1)
    chosen = torch.where(scores == best[..., None], ids, torch.iinfo(torch.int32).max).amin(-1)
    chosen = torch.where(best == float("inf"), -1, chosen)
    guesses = torch.arange(tokens.shape[1] - 1, device=tokens.device) < draft_len[:, None]
    agrees = (tokens[:, 1:] == chosen[:, :-1]) & guesses
    accepted = agrees.long().cumprod(1).sum(1)
    return chosen, accepted.int(), chosen.gather(1, accepted[:, None])[:, 0]
