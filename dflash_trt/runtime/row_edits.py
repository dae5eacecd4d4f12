"""What changes rows of logits before a token is chosen from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.penalties import Penalties
from dflash_trt.runtime.sampling_params import SamplingParams


class RowEdit(Protocol):
    """A change to the logits of one request, which may depend on the tokens before a row."""

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """Edited logits [R, V].

        Args:
            logits: [R, V], left as they are. The last row comes after the output so far and all guesses, the one before
                it after all but the last guess, and so on.
            guesses: [at least R - 1] token ids on the CPU.
        """

    def record(self, token: int) -> None:
        """Take note of an emitted token."""


class LogitBias:
    """Adds to the logits of some tokens.

    Args:
        bias: what is added, by token id inside the vocabulary.
    """

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(bias))
        self._values = torch.tensor(list(bias.values()), dtype=torch.float64)

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """See `RowEdit.apply`."""
        ids = self._ids.to(logits.device)
        return logits.index_add(1, ids, self._values.to(logits.device, logits.dtype).expand(len(logits), -1))

    def record(self, token: int) -> None:
        """See `RowEdit.record`."""


class MinTokens:
    """Makes tokens that end an output impossible until it is long enough, except where nothing else may follow.

    Args:
        least: output tokens before one of them.
        stop_token_ids: these tokens.
    """

    def __init__(self, least: int, stop_token_ids: Collection[int]) -> None:
        self._least = least
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self._length = 0

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """See `RowEdit.apply`."""
        first = self._length + len(guesses) - len(logits) + 1
        early = self._least - first
        if early <= 0:
            return logits
        edited = logits.clone()
        edited[:early, self._stop_token_ids.to(logits.device)] = float("-inf")
        impossible = edited.isneginf().all(-1, keepdim=True)
        return torch.where(impossible, logits, edited)

    def record(self, token: int) -> None:
        """See `RowEdit.record`."""
        self._length += 1


def row_edits(
    params: SamplingParams,
    prompt: Sequence[int],
    vocab_size: int,
    stop_token_ids: Collection[int],
    grammar: GrammarMask | None,
) -> tuple[RowEdit, ...]:
    """What a request's parameters ask for, in the order in which it is applied."""
    edits: list[RowEdit] = [] if grammar is None else [grammar]
    if params.logit_bias:
        edits.append(LogitBias(params.logit_bias))
    if params.min_tokens and stop_token_ids:
        edits.append(MinTokens(params.min_tokens, stop_token_ids))
    if params.penalizes:
        edits.append(Penalties(params, prompt, vocab_size))
    return tuple(edits)
