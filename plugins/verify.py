"""`dflash::verify_partial` and `dflash::verify_combine`: from logits to accepted guesses and the token after them.

The token at position p is argmax(logits / T + Gumbel(seed, p, token id)), and at T = 0 the plain argmax; guesses are
accepted while they are the tokens chosen. Each rank takes the best of every chunk of its part of the vocabulary; ranks
exchange those, and all combine them. Logits never leave the GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_trt.plugins.kernel import Kernel, cdiv, pointer, require_shape
from dflash_trt.plugins.noise import gumbel, reference_gumbel

CHUNK = 4096
"""Tokens of which `verify_partial` keeps one."""


@triton.jit
def dflash_verify_partial(
    logits,
    temperature,
    seeds,
    first,
    valid,
    offset,
    batch,
    rows,
    scores,
    ids,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one row a thread block."""
    chunk, row, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = (sequence * rows + row).to(tl.int64)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    # A mask of what is known when compiling keeps loads wide.
    score = tl.load(logits + index * TOKENS + columns, mask=columns < TOKENS, other=float("-inf")).to(tl.float32)
    score = tl.where(score == score, score, float("inf"))
    score = tl.where(columns < tl.load(valid), score, float("-inf"))
    first_id = tl.load(offset) + chunk * CHUNK
    heat = tl.load(temperature + sequence)
    if heat > 0:
        position = tl.load(first + sequence) + row
        score = tl.div_rn(score, heat) + gumbel(tl.load(seeds + sequence), position, first_id, CHUNK)
    best, best_column = tl.max(score, 0, return_indices=True)
    place = index * tl.num_programs(0) + chunk
    tl.store(scores + place, best)
    tl.store(ids + place, first_id + best_column)


@triton.jit
def dflash_verify_combine(
    scores,
    ids,
    tokens,
    draft_len,
    batch,
    rows,
    chunks,
    chosen,
    accepted,
    next,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """One sequence a thread block."""
    sequence = tl.program_id(0)
    guesses = tl.load(draft_len + sequence)
    agreed = rows - 1
    following = 0
    for first_row in range(0, rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        index = (sequence * rows + row).to(tl.int64)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        best_id = tl.full([ROWS], 2147483647, tl.int32)
        for first_chunk in range(0, chunks, CHUNKS):
            chunk = first_chunk + tl.arange(0, CHUNKS)
            exists = (row < rows)[:, None] & (chunk < chunks)[None, :]
            place = index[:, None] * chunks + chunk[None, :]
            score = tl.load(scores + place, mask=exists, other=float("-inf"))
            id = tl.load(ids + place, mask=exists, other=2147483647)
            part = tl.max(score, 1)
            part_id = tl.min(tl.where(score == part[:, None], id, 2147483647), 1)
            better = (part > best) | ((part == best) & (part_id < best_id))
            best = tl.where(better, part, best)
            best_id = tl.where(better, part_id, best_id)
        best_id = tl.where(best == float("inf"), -1, best_id)
        tl.store(chosen + index, best_id, mask=row < rows)
        guess = tl.load(tokens + index + 1, mask=row + 1 < rows, other=-1)
        agrees = (row < guesses) & (row + 1 < rows) & (guess == best_id)
        agreed = tl.minimum(agreed, tl.min(tl.where(agrees, rows, row), 0))
        # Once a row disagrees, this is not changed by those that come after.
        following += tl.sum(tl.where(row == agreed, best_id, 0), 0)
    tl.store(accepted + sequence, agreed)
    tl.store(next + sequence, following)


def partial(dtype: torch.dtype, tokens: int, chunk: int = CHUNK) -> Kernel:
    """The kernel of `verify_partial` for logits of `dtype` and a part of the vocabulary that has room for `tokens`."""
    return Kernel(
        dflash_verify_partial,
        parameters={
            "logits": pointer(dtype),
            "temperature": "*fp32",
            "seeds": "*i64",
            "first": "*i32",
            "valid": "*i32",
            "offset": "*i32",
            "batch": "i32",
            "rows": "i32",
            "scores": "*fp32",
            "ids": "*i32",
        },
        constants={"TOKENS": tokens, "CHUNK": chunk},
        grid=lambda sizes: (cdiv(tokens, chunk), sizes["rows"], sizes["batch"]),
        num_warps=16,
        max_registers=64,
    )


def combine() -> Kernel:
    """The kernel of `verify_combine`."""
    return Kernel(
        dflash_verify_combine,
        parameters={
            "scores": "*fp32",
            "ids": "*i32",
            "tokens": "*i32",
            "draft_len": "*i32",
            "batch": "i32",
            "rows": "i32",
            "chunks": "i32",
            "chosen": "*i32",
            "accepted": "*i32",
            "next": "*i32",
        },
        constants={"ROWS": 16, "CHUNKS": 64},
        grid=lambda sizes: (sizes["batch"], 1, 1),
    )


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
    batch, rows, tokens = logits.shape
    for name, tensor in {"temperature": temperature, "seeds": seeds, "first": first}.items():
        require_shape("verify_partial", name, tensor, (batch,))
    for name, tensor in {"valid": valid, "offset": offset}.items():
        require_shape("verify_partial", name, tensor, (1,))
    if not logits.is_cuda and not interpret:
        return reference_partial(logits, temperature, seeds, first, valid, offset, chunk)
    scores = logits.new_empty((batch, rows, cdiv(tokens, chunk)), dtype=torch.float32)
    ids = torch.empty_like(scores, dtype=torch.int32)
    kernel = partial(logits.dtype, tokens, chunk)
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
    batch, rows, chunks = scores.shape
    require_shape("verify_combine", "ids", ids, (batch, rows, chunks))
    require_shape("verify_combine", "tokens", tokens, (batch, rows))
    require_shape("verify_combine", "draft_len", draft_len, (batch,))
    if not scores.is_cuda and not interpret:
        return reference_combine(scores, ids, tokens, draft_len)
    chosen = torch.empty_like(tokens)
    accepted, following = torch.empty_like(draft_len), torch.empty_like(draft_len)
    combine().launch(scores, ids, tokens, draft_len, batch, rows, chunks, chosen, accepted, following)
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


def reference_partial(
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
    noise = reference_gumbel(seeds[:, None, None], positions[..., None], offset + columns)
    heat = temperature[:, None, None]
    score = torch.where(heat > 0, score / torch.where(heat > 0, heat, 1.0) + noise, score)
    score = torch.nn.functional.pad(score, (0, -tokens % chunk), value=float("-inf")).unflatten(-1, (-1, chunk))
    best = score.max(-1)
    starts = torch.arange(0, tokens, chunk, device=logits.device)
    return best.values, (offset + starts + best.indices).int()


def reference_combine(scores: Tensor, ids: Tensor, tokens: Tensor, draft_len: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_combine` in torch."""
    best = scores.amax(-1)
    chosen = torch.where(scores == best[..., None], ids, torch.iinfo(torch.int32).max).amin(-1)
    chosen = torch.where(best == float("inf"), -1, chosen)
    guesses = torch.arange(tokens.shape[1] - 1, device=tokens.device) < draft_len[:, None]
    agrees = (tokens[:, 1:] == chosen[:, :-1]) & guesses
    accepted = agrees.long().cumprod(1).sum(1)
    return chosen, accepted.int(), chosen.gather(1, accepted[:, None])[:, 0]
