"""Tokens as clients see them, and how likely they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.token_bytes import TokenBytes
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.scheduler import Emission

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has not; vLLM's choice."""


class TokenTexts:
    """What each id of a vocabulary stands for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._bytes = TokenBytes(tokenizer)

    def text(self, token: int) -> str:
        """A token's text, the replacement character where it is part of one; the vocabulary's padding has none."""
        return self._bytes[token].decode(errors="replace")

    def label(self, token: int) -> str:
        r"""A token's text, or its bytes as OpenAI writes them where they are no whole text: `bytes:\xe2\x96`."""
        try:
            return self._bytes[token].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(rf"\x{byte:02x}" for byte in self._bytes[token])

    def in_chat(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        found = [(emission.token, _found(emission)) for emission in emissions]
        entries = [
            {**self._entry(token, each.logprob), "top_logprobs": [self._entry(*other) for other in each.top]}
            for token, each in found
        ]
        return {"content": entries, "refusal": None}

    def in_completion(self, emissions: Sequence[Emission], start: int) -> dict[str, Any]:
        """`logprobs` of a plain choice, whose output begins after `start` characters of its text."""
        found = [(emission.token, _found(emission)) for emission in emissions]
        return {
            "tokens": [self.label(token) for token, _ in found],
            "token_logprobs": [max(each.logprob, _LEAST) for _, each in found],
            "top_logprobs": [self._by_label(token, each) for token, each in found],
            "text_offset": [start + emission.offset for emission in emissions],
        }

    def _by_label(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, likeliest first, and the chosen one. Of several with one label the likeliest is told,
        or the chosen one."""
        found: dict[str, float] = {}
        for other, logprob in logprobs.top:
            found.setdefault(self.label(other), max(logprob, _LEAST))
        return {**found, self.label(token): max(logprobs.logprob, _LEAST)}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _LEAST), "bytes": list(self._bytes[token])}


def _found(emission: Emission) -> TokenLogprobs:
    assert emission.logprobs is not None, "the request's parameters ask for them"
    return emission.logprobs
