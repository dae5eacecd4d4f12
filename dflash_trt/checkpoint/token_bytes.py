"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """The bytes of each id, by the decoder of tokenizer.json; empty for ids between that no token has.

    Spaces at the beginning of a text, which some decoders strip, are kept: a token does not know where it stands.
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    parts = {part["type"]: part for part in _parts(decoder)}
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = tokenizer.get_vocab()
    texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for text, index in vocabulary.items():
        if index in added:
            texts[index] = added[index].encode()
        elif "ByteLevel" in parts:
            texts[index] = _byte_level(text)
        else:
            found = _BYTE.fullmatch(text) if "ByteFallback" in parts else None
            texts[index] = bytes([int(found[1], 16)]) if found else _spaced(text, parts).encode()
    return texts


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _parts(each)
    elif decoder is not None:
        yield decoder


def _spaced(text: str, parts: dict[str, dict[str, Any]]) -> str:
    if "Metaspace" in parts:
        return text.replace(parts["Metaspace"]["replacement"], " ")
    replaced = parts.get("Replace", {})
    pattern = replaced.get("pattern", {}).get("String")
    return text if pattern is None else text.replace(pattern, replaced["content"])


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
