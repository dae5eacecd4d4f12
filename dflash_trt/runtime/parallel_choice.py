"""The choice of tokens where each rank has the logits of its part of the vocabulary."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dflash_trt.ops.ranks import Ranks, vocabulary_part
from dflash_trt.runtime.logprobs import log_probabilities
from dflash_trt.runtime.sampling import Sampling, choose, choose_in_part
from dflash_trt.runtime.verifier import NOT_FINITE, Step, Verified


def verify_among_ranks(ranks: Ranks, logits: Tensor, vocab_size: int, step: Step) -> Verified:
    """What a step's logits make of it; the same on every rank but for log-probabilities, which rank 0 has.

    Args:
        logits: [B, R, P] as for `choose_among_ranks`.

    A row where a logit of any rank is not finite chooses `NOT_FINITE`.
    """
    infinite = ranks.all_gather(~logits.isfinite().all(-1)).any(0)
    if bool(infinite.any()):
        logits = logits.masked_fill(infinite[..., None], 0)
    if step.sampling.needs_rows:
        logits = whole_rows(ranks, logits, vocab_size)
        chosen = _choose_from_rows(ranks, logits, step.chosen_positions, step.sampling, step.guesses)
    else:
        chosen = choose_among_ranks(ranks, logits, vocab_size, step.chosen_positions, step.sampling, step.guesses)
    chosen[infinite.cpu()] = NOT_FINITE
    verified = step.verified(chosen)
    wanted = step.sampling.logprobs
    if any(count is not None for count in wanted):
        verified = replace(verified, logprobs=log_probabilities(logits, chosen, verified.accepted, wanted))
    return verified


def choose_among_ranks(
    ranks: Ranks, logits: Tensor, vocab_size: int, positions: Tensor, sampling: Sampling, guesses: Tensor | None
) -> Tensor:
    """`choose`, of all ranks together; every rank returns the same.

    Ranks exchange the score and id of their best tokens. Where edits or filters look at whole rows, these are
    gathered, and rank 0 chooses.

    Args:
        logits: [B, R, P] of this rank's tokens `ranks.rank` * P.., of which those from `vocab_size` on are padding.
        vocab_size: of the model.
        positions, guesses: as for `choose`.

    Returns:
        [B, R] token ids on the CPU.
    """
    if ranks.size == 1:
        return choose(logits, positions, sampling, guesses)
    if sampling.needs_rows:
        return _choose_from_rows(ranks, whole_rows(ranks, logits, vocab_size), positions, sampling, guesses)
    first, valid = vocabulary_part(ranks.rank, logits.shape[-1], vocab_size)
    logits[..., valid:] = float("-inf")
    scores, ids = choose_in_part(logits, positions, sampling, first)
    # Both in one exchange; float64 and int64 are as wide.
    found = ranks.all_gather(torch.stack((scores.view(torch.int64), ids)))
    best = found[:, 0].view(torch.float64).argmax(0, keepdim=True)
    return found[:, 1].gather(0, best)[0].cpu()


def whole_rows(ranks: Ranks, logits: Tensor, vocab_size: int) -> Tensor:
    """[B, R, vocab_size] of all ranks' parts [B, R, P]."""
    return ranks.all_gather(logits).movedim(0, -2).flatten(-2)[..., :vocab_size]


def not_finite(dtype: torch.dtype) -> str:
    """What to say of logits that are not, and what helps."""
    if dtype == torch.float16:
        return "the target's logits are not finite in float16; build the engine with --dtype bfloat16 or float32"
    return (
        f"the target's logits are not finite in {str(dtype).removeprefix('torch.')}: weights are damaged or scales "
        "wrong; check the checkpoint with dflash-trt inspect, and build the engine again"
    )


def _choose_from_rows(
    ranks: Ranks, rows: Tensor, positions: Tensor, sampling: Sampling, guesses: Tensor | None
) -> Tensor:
    if ranks.size == 1:
        return choose(rows, positions, sampling, guesses)
    chosen = torch.zeros_like(positions)
    if ranks.rank == 0:
        chosen = choose(rows, positions, sampling, guesses)
    return ranks.broadcast(chosen.to(rows.device)).cpu()
