"""Tokens as clients see them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.runtime.logprobs import TokenLogprobs


class TokenTexts:
    """What each token id of a vocabulary stands for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def chat_entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """One of `logprobs.content` of a chat choice."""
        top = [self._named(alternative, logprob) for alternative, logprob in logprobs.top]
        return {**self._named(token, logprobs.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
