"""The texts that end an output, found while it comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_trt.errors import UserError

_MARKS = range(0xD800, 0xE000)
"""Surrogates, of which text has none: each stands for a token that leaves no text, whole."""


class StopTexts:
    """Looks for stop texts in what an output's tokens spell.

    Tokens that leave no text are looked for where a stop text has theirs, and as a whole: "|" is not in "<|im_end|>".

    Args:
        stop: the stop texts, none of them empty.
        textless: what tokens would spell that leave no text, by id.

    Raises:
        UserError: more than 2048 such tokens are in the stop texts.
    """

    def __init__(self, stop: Sequence[str], textless: Mapping[int, str]) -> None:
        named = {token: text for token, text in textless.items() if text and any(text in each for each in stop)}
        if len(named) > len(_MARKS):
            raise UserError(f"stop has {len(named)} special tokens in it, it may have {len(_MARKS)}")
        self._marks = dict(zip(named, map(chr, _MARKS), strict=False))
        longest_first = sorted(named, key=lambda token: len(named[token]), reverse=True)
        marked = []
        for text in stop:
            for token in longest_first:
                text = text.replace(named[token], self._marks[token])
            marked.append(text)
        self._text = _Search(stop)
        self._marked = _Search([text for text in marked if text not in stop])

    def push(self, token: int, text: str) -> int | None:
        """Take a token and the text that came with it.

        Returns:
            Characters from the first stop text on that ends in it; None where none does.
        """
        found = [self._text.push(text), self._marked.push(self._marks.get(token, text))]
        return max((_length(rest) for rest in found if rest is not None), default=None)

    @property
    def possible(self) -> int:
        """Characters at the end that may begin a stop text."""
        return max(_length(search.begun) for search in (self._text, self._marked))


class _Search:
    """Some texts looked for in one that comes in pieces."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._longest = max(map(len, texts), default=0)
        self._end = ""
        """What came last, as far as one of the texts may begin in it."""

    def push(self, piece: str) -> str | None:
        """Take more; what came from the first of the texts on that ends in this piece."""
        before = len(self._end)
        self._end += piece
        found = [self._end.find(text, max(0, before - len(text) + 1)) for text in self._texts]
        first = min((at for at in found if at >= 0), default=None)
        rest = None if first is None else self._end[first:]
        self._end = self._end[max(0, len(self._end) - self._longest + 1) :] if self._longest else ""
        return rest

    @property
    def begun(self) -> str:
        """The longest end that begins one of the texts."""
        ends = (self._end[at:] for at in range(len(self._end)))
        return next((end for end in ends if any(text.startswith(end) and text != end for text in self._texts)), "")


def _length(text: str) -> int:
    return sum(ord(character) not in _MARKS for character in text)
