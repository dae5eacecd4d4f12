"""Sequences whose requests have ended, in slots that nobody needs yet: prompts that begin alike go on from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """A sequence in a slot that begins like a prompt."""

    slot: int
    length: int
    """Tokens they share."""
    is_whole: bool
    """The prompt goes on where the sequence ends, and may have its slot."""


class KeptSequences:
    """By slot, the tokens that both caches hold there; the least recently used goes first."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, slot: int) -> bool:
        return slot in self._tokens

    @property
    def tokens(self) -> dict[int, list[int]]:
        """A copy: what is kept in which slot, least recently used first."""
        return dict(self._tokens)

    def keep(self, slot: int, tokens: list[int]) -> None:
        """Remember what a slot holds, as the most recently used."""
        if tokens:
            self._tokens[slot] = tokens

    def take(self, slot: int) -> list[int]:
        """Forget a slot, and say what it holds."""
        return self._tokens.pop(slot)

    def evict(self) -> int:
        """Forget the least recently used; its slot."""
        slot = next(iter(self._tokens))
        del self._tokens[slot]
        return slot

    def match(self, prompt: Sequence[int]) -> Match | None:
        """What shares the most tokens with a prompt, if anything shares one; it is then the most recently used."""
        shared = {slot: common_prefix(tokens, prompt) for slot, tokens in self._tokens.items()}
        slot = max(shared, key=lambda each: shared[each], default=None)
        if slot is None or shared[slot] == 0:
            return None
        tokens = self.take(slot)
        self.keep(slot, tokens)
        return Match(slot, shared[slot], shared[slot] == len(tokens))


def common_prefix(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginnings; by whole slices, which are compared fast."""
    least, most = 0, min(len(tokens), len(prompt))
    while least < most:
        middle = (least + most + 1) // 2
        if tokens[least:middle] == prompt[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
