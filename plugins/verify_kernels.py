"""The kernels of `verify_partial` and `verify_combine`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernel import Kernel, cdiv, pointer
from dflash_trt.plugins.noise_kernel import gumbel

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


def verify_partial_kernel(dtype: torch.dtype, tokens: int, chunk: int = CHUNK) -> Kernel:
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


def verify_combine_kernel() -> Kernel:
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
