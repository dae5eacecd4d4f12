"""Penalties on tokens that prompt or output have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_trt.runtime.sampling_params import SamplingParams


class Penalties:
    """One request's penalties and the token counts they depend on.

    Args:
        params: its parameters.
        prompt: its token ids.
        vocab_size: V of the logits.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self._params = params
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        self._in_prompt[list(prompt)] = True
        self._in_output = torch.zeros(vocab_size, dtype=torch.int64)

    def record(self, token: int) -> None:
        """Count an emitted token."""
        self._in_output[token] += 1

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """See `RowEdit.apply`."""
        counts = self._in_output.repeat(len(logits), 1)
        before = len(guesses) - len(logits) + 1
        for index, guess in enumerate(guesses.tolist()):
            counts[max(0, index + 1 - before) :, guess] += 1
        counts = counts.to(logits.device)
        seen = self._in_prompt.to(logits.device) | (counts > 0)
        factor = self._params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - self._params.frequency_penalty * counts
        return logits - self._params.presence_penalty * (counts > 0)
