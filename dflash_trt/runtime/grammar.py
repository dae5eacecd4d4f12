"""Outputs held to a grammar: which tokens may follow, along the guesses of a draft too."""

from __future__ import annotations

from collections.abc import Collection

import numpy
import torch
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.runtime.kept import common_prefix


class GrammarMask:
    """Makes tokens impossible that would take one request's output out of its form.

    The matcher goes ahead of the output along the guesses, and stays there: drafting, which asks for one place after
    the other, verification, and what is then emitted of it share one walk, and only what turned out otherwise is taken
    back.

    What may follow is a function of the tokens before. Where the matcher gives up, it may be for what it has seen along
    guesses that were taken back; a new one, which has seen the tokens before and nothing else, decides.

    Args:
        compiled: a matcher at the beginning of the form, whose token `vocab_size` says that the form may end.
        vocab_size: V, tokens that logits are of.
        stop_token_ids: tokens that may follow where the form may end.
    """

    def __init__(self, compiled: LLMatcher, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._compiled = compiled
        self._matcher = compiled.deep_copy()
        self._vocab_size = vocab_size
        self._stop_token_ids = [token for token in stop_token_ids if token < vocab_size]
        self._output: list[int] = []
        self._ahead: list[int] = []
        """Guesses after the output that fit; a stop token may be the last, which the matcher never sees."""
        self._masks: list[Tensor] = []
        """[V] bool, whether each token may follow the output, one guess, two, ...; of each place once it is reached."""
        self._ends: list[bool] = []
        """Whether the form may end at each of these places."""

    @property
    def allows_any(self) -> bool:
        """Whether any token may come next, or an end."""
        self._reach()
        return bool(self._masks[0].any()) or self._ends[0]

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come next but an end."""
        self._reach()
        if not self._masks:
            return True
        return self._ends[0] and int(self._masks[0].count_nonzero()) == len(self._stop_token_ids)

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """See `RowEdit.apply`. Rows after a guess that does not fit are left as they are: none is looked at."""
        self._walk(guesses.tolist())
        first = len(guesses) - len(logits) + 1
        masks = self._masks[first : len(guesses) + 1]
        masks += [torch.ones(self._vocab_size, dtype=torch.bool)] * (len(logits) - len(masks))
        return torch.where(torch.stack(masks).to(logits.device), logits, float("-inf"))

    def record(self, token: int) -> None:
        """Take an emitted token.

        Raises:
            UserError: it does not fit, or what the form allows after it cannot be told.
        """
        if self._ahead[:1] != [token]:
            self._turn_back(0)
            self._reach()
            if not self._accept(token):
                raise UserError(f"structured_outputs: token {token} does not fit the form, or makes it too ambiguous")
        self._output.append(token)
        del self._ahead[0], self._masks[:1], self._ends[:1]

    def _walk(self, guesses: list[int]) -> None:
        """Go along guesses as far as they fit, from where they leave the walk before."""
        self._reach()
        shared = common_prefix(self._ahead, guesses)
        if shared == len(guesses):
            return
        self._turn_back(shared)
        for guess in guesses[shared:]:
            if not self._accept(guess):
                return
            self._reach()

    def _is_over(self) -> bool:
        """A stop token has come."""
        return (self._ahead or self._output)[-1:] != [] and (self._ahead or self._output)[-1] in self._stop_token_ids

    def _turn_back(self, length: int) -> None:
        taken_back = len(self._ahead) - length - (bool(self._ahead[length:]) and self._is_over())
        del self._ahead[length:], self._masks[length + 1 :], self._ends[length + 1 :]
        if taken_back and not self._matcher.rollback(taken_back):
            self._start_again()

    def _accept(self, token: int) -> bool:
        if self._is_over() or not self._masks[len(self._ahead)][token]:
            return False
        if token not in self._stop_token_ids and not self._matcher.consume_token(token):
            self._start_again()
            if not self._matcher.consume_token(token):
                self._start_again()
                return False
        self._ahead.append(token)
        return True

    def _reach(self) -> None:
        """Note what may come where the matcher is, once, and nothing after an end."""
        if len(self._masks) > len(self._ahead) or self._is_over():
            return
        bits = self._bits()
        if bits is None:
            self._start_again()
            bits = self._bits()
        if bits is None:  # a place from where nothing leads on
            self._start_again()
            bits = numpy.zeros(self._vocab_size + 1, dtype=numpy.uint8)
        allowed, ends = torch.from_numpy(bits[: self._vocab_size]).bool(), bool(bits[self._vocab_size])
        allowed[self._stop_token_ids] = ends
        self._masks.append(allowed)
        self._ends.append(ends)

    def _bits(self) -> numpy.typing.NDArray[numpy.uint8] | None:
        """[V + 1] 1 for what may come; None where the matcher gives up, and is of no more use."""
        packed = allocate_token_bitmask(1, self._vocab_size + 1)
        fill_next_token_bitmask(self._matcher, packed)
        if self._matcher.is_error():
            return None
        return numpy.unpackbits(packed.view(numpy.uint8)[0], count=self._vocab_size + 1, bitorder="little")

    def _start_again(self) -> None:
        """A new matcher, at the same place."""
        self._matcher = self._compiled.deep_copy()
        seen = [token for token in (*self._output, *self._ahead) if token not in self._stop_token_ids]
        self._matcher.consume_tokens(seen)
