"""How likely the target held the tokens of an output, and what else it held likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one emitted token: natural logarithms of the target's own probabilities, before any parameter changes them."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there and theirs, likeliest first; as many as `SamplingParams.logprobs` asked for."""


def log_probabilities(
    logits: Tensor, chosen: Tensor, accepted: Tensor, wanted: Sequence[int | None]
) -> list[list[TokenLogprobs]]:
    """Those of the tokens that a pass emits.

    Args:
        logits: [B, R, V] of the target, as it gave them.
        chosen: [B, R] tokens on the CPU; those after the accepted ones are not looked at.
        accepted: [B] guesses that the target agrees with.
        wanted: B times how many of the likeliest tokens, None where nothing is asked for.
    """
    found: list[list[TokenLogprobs]] = []
    for row, (count, rows) in enumerate(zip(wanted, (accepted + 1).tolist(), strict=True)):
        found.append([] if count is None else _of_rows(logits[row, :rows], chosen[row, :rows], count))
    return found


def _of_rows(logits: Tensor, chosen: Tensor, count: int) -> list[TokenLogprobs]:
    of_all = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    # A row that is not finite has chosen no token, and is not emitted.
    own = of_all.gather(-1, chosen.clamp(min=0).to(logits.device)[:, None])[:, 0].tolist()
    best = of_all.topk(min(count, of_all.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprobs(one, tuple(zip(*top, strict=True))) for one, top in zip(own, pairs, strict=True)]
