"""The bytes that each token of a vocabulary stands for, by the decoder of its tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.errors import UserError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")
"""Decoders that make of a token the same text wherever it stands, but for spaces at the beginning of a text."""
_BEFORE = "a"
"""A token of any vocabulary's kind, for another to stand after."""


class TokenBytes:
    """The bytes of each token, found when they are first asked for.

    Decoders with byte fallback turn bytes that are no UTF-8 into replacement characters; here they stay bytes.

    Args:
        tokenizer: the model's.

    Raises:
        UserError: its decoder is one that makes of a token different texts in different places.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = self._tokenizer.decoder
        self._kinds = require_decoder(tokenizer)
        self._found: dict[int, bytes] = {}

    @property
    def is_byte_level(self) -> bool:
        """Every token is a run of bytes, and a text all of them joined; otherwise only some stand for single bytes."""
        return "ByteLevel" in self._kinds

    def __len__(self) -> int:
        """One more than the highest id."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def __getitem__(self, token: int) -> bytes:
        """A token's bytes inside a text, spaces before a word included; none of an id that no token has."""
        if token not in self._found:
            self._found[token] = self._read(token)
        return self._found[token]

    def first(self, token: int) -> bytes:
        """A token's bytes at the beginning of a text, where some decoders drop a space."""
        text = self._tokenizer.id_to_token(token)
        if text is None or self.is_byte_level or self._byte(text) is not None:
            return self[token]
        return self._decode(text).encode()

    def _read(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self.is_byte_level:
            return _byte_level(text)
        byte = self._byte(text)
        return self._decode(_BEFORE, text)[len(_BEFORE) :].encode() if byte is None else byte

    def _byte(self, text: str) -> bytes | None:
        found = _BYTE.fullmatch(text) if "ByteFallback" in self._kinds else None
        return bytes([int(found[1], 16)]) if found else None

    def _decode(self, *tokens: str) -> str:
        return " ".join(tokens) if self._decoder is None else str(self._decoder.decode(list(tokens)))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """The bytes of every id, as `TokenBytes` has them."""
    found = TokenBytes(tokenizer)
    return [found[token] for token in range(len(found))]


def require_decoder(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """The kinds of decoders that turn a tokenizer's tokens into text, seen to be supported.

    Raises:
        UserError: one is not.
    """
    decoder = tokenizer.backend_tokenizer.decoder
    kinds = frozenset(_kinds(json.loads(decoder.__getstate__()) if decoder is not None else None))
    strange = sorted(kinds.difference(_SUPPORTED))
    if strange:
        raise UserError(f"decoder of type {strange[0]} is not supported; supported are {', '.join(_SUPPORTED)}")
    return kinds


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is not None and decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _kinds(each)
    elif decoder is not None:
        yield decoder["type"]


def _byte_level(text: str) -> bytes:
    try:
        return bytes(map(_byte_of().__getitem__, text))
    except KeyError:
        return text.encode()


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's characters for bytes: those that can be seen stand for themselves, the others for 256 and up."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in seen]
    return {**{chr(byte): byte for byte in seen}, **{chr(256 + at): byte for at, byte in enumerate(others)}}
