"""Tokens as clients see them, and how likely they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast
from xgrammar import TokenizerInfo

from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.scheduler import Emission

_LEAST = -9999.0
"""Stands for minus infinity, which JSON has not; vLLM's choice."""


class TokenTexts:
    """What each id of a vocabulary stands for; to make one reads it all, which takes a while."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._bytes = list(TokenizerInfo.from_huggingface(tokenizer).decoded_vocab)

    def text(self, token: int) -> str:
        """A token's text, the replacement character where it is part of one; the vocabulary's padding has none."""
        return self._of(token).decode(errors="replace")

    def _of(self, token: int) -> bytes:
        return self._bytes[token] if token < len(self._bytes) else b""

    def in_chat(self, emissions: Sequence[Emission]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        found = [(emission.token, _found(emission)) for emission in emissions]
        entries = [
            {**self._entry(token, each.logprob), "top_logprobs": [self._entry(*other) for other in each.top]}
            for token, each in found
        ]
        return {"content": entries, "refusal": None}

    def in_completion(self, emissions: Sequence[Emission], offset: int) -> dict[str, Any]:
        """`logprobs` of a plain choice, in whose text these begin after `offset` characters."""
        offsets = []
        for emission in emissions:
            offsets.append(offset)
            offset += len(emission.text)
        found = [(self.text(emission.token), _found(emission)) for emission in emissions]
        return {
            "tokens": [text for text, _ in found],
            "token_logprobs": [max(each.logprob, _LEAST) for _, each in found],
            "top_logprobs": [
                {
                    **{self.text(token): max(logprob, _LEAST) for token, logprob in each.top},
                    text: max(each.logprob, _LEAST),
                }
                for text, each in found
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": max(logprob, _LEAST), "bytes": list(self._of(token))}


def _found(emission: Emission) -> TokenLogprobs:
    assert emission.logprobs is not None, "the request's parameters ask for them"
    return emission.logprobs
