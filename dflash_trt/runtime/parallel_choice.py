"""The choice of a token where each rank has the logits of its part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.ops.ranks import Ranks, vocabulary_part
from dflash_trt.runtime.sampling import Sampling, choose, choose_in_part


def choose_among_ranks(
    ranks: Ranks, logits: Tensor, vocab_size: int, positions: Tensor, sampling: Sampling, guesses: Tensor
) -> Tensor:
    """`choose`, of all ranks together; every rank returns the same.

    Ranks exchange the score and id of their best tokens. Where penalties or filters look at whole rows, these are
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
        return _choose_from_rows(ranks, logits, vocab_size, positions, sampling, guesses)
    first, valid = vocabulary_part(ranks.rank, logits.shape[-1], vocab_size)
    logits[..., valid:] = float("-inf")
    scores, ids = choose_in_part(logits, positions, sampling, first)
    # Both in one exchange; float64 and int64 are as wide.
    found = ranks.all_gather(torch.stack((scores.view(torch.int64), ids)))
    best = found[:, 0].view(torch.float64).argmax(0, keepdim=True)
    return found[:, 1].gather(0, best)[0].cpu()


def refuse_overflow(logits: Tensor, ranks: Ranks) -> None:
    """Refuse logits of any rank that are not finite: to choose from them would be silent nonsense.

    Raises:
        UserError: on every rank.
    """
    if not bool(ranks.all_gather(logits.isfinite().all().reshape(1)).all()):
        raise overflow(logits.dtype)


def overflow(dtype: torch.dtype) -> UserError:
    """What to say of logits that are not finite."""
    narrow = str(dtype).removeprefix("torch.")
    return UserError(f"the target's values overflow {narrow}; build the engine with --dtype bfloat16 or float32")


def _choose_from_rows(
    ranks: Ranks, logits: Tensor, vocab_size: int, positions: Tensor, sampling: Sampling, guesses: Tensor
) -> Tensor:
    rows = ranks.all_gather(logits).movedim(0, -2).flatten(-2)[..., :vocab_size]
    chosen = torch.zeros_like(positions)
    if ranks.rank == 0:
        chosen = choose(rows, positions, sampling, guesses)
    return ranks.broadcast(chosen.to(logits.device)).cpu()
