"""How many values a JSON text has and how deep they nest, known before any of them is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE = b'"\\,{}'
_BIT = 0x20
"""With it, "[" is "{" and "]" is "}"; no other ASCII character becomes one of these."""


@dataclass(frozen=True)
class JsonShape:
    """Of a text that is JSON; of any other, how far a parser may come."""

    values: int
    depth: int
    """Lists and objects in one another."""


def json_shape(text: bytes) -> JsonShape:
    """The shape of a text, in time and memory of its length.

    Python objects take up to fifty times the memory of their text, and a parser makes all of them in one go.
    """
    characters = np.frombuffer(text, np.uint8)
    outside = ~np.logical_xor.accumulate(_quotes(characters)) if len(text) else np.empty(0, bool)
    folded = characters | _BIT
    opens, closes = outside & (folded == _OPEN), outside & (folded == _CLOSE)
    steps = opens[opens | closes].astype(np.int64) * 2 - 1
    depth = int(steps.cumsum().max(initial=0))
    commas = np.count_nonzero(outside & (characters == _COMMA))
    return JsonShape(1 + int(commas) + int(np.count_nonzero(opens)), depth)


def _quotes(characters: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Those that begin or end a string: no odd number of backslashes stands before them."""
    quotes: NDArray[np.bool_] = characters == _QUOTE
    (slashes,) = np.nonzero(characters == _BACKSLASH)
    if len(slashes):
        begins = np.diff(slashes, prepend=-2) != 1
        run = np.maximum.accumulate(np.where(begins, slashes, 0))
        escaping = slashes[(slashes - run) % 2 == 0]
        quotes[escaping[escaping + 1 < len(quotes)] + 1] = False
    return quotes
