"""How likely the target held the tokens of an output, and what else it held likely."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one emitted token: natural logarithms of the target's own probabilities, before any parameter changes them."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens there and theirs, likeliest first; as many as `SamplingParams.logprobs` asked for."""
