"""An output's text as its tokens come, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.special_tokens import textless_token_ids
from dflash_trt.checkpoint.token_bytes import TokenBytes
from dflash_trt.runtime.stop_texts import StopTexts
from dflash_trt.runtime.text_stream import TextStream

_TAIL = 4
"""Tokens of a prompt that an output goes on from: each has a byte of the longest character, or more."""


class Detokenizer:
    """Decodes one output token by token.

    Text that may yet become part of a stop text is held back, so what was shown is never taken back. Tokens that end
    inside a character yield nothing until it is whole.

    Args:
        tokenizer: the model's.
        stop: texts that end the output. One may have special tokens in it, which leave no text.
        prompt: what the output goes on from; its end decides how the first tokens are spelled.
        min_tokens: tokens whose text stops nothing; a stop text may begin in it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        stop: Sequence[str],
        *,
        prompt: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        """What may be shown."""
        self.stopped = False
        tokens, self._textless = _vocabulary(tokenizer)
        self._stream = TextStream(tokens, self._tail(tokens, prompt))
        self._stop = StopTexts(stop, self._textless)
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    @property
    def length(self) -> int:
        """Characters so far, those held back too."""
        return len(self.text) + len(self._held)

    def push(self, token: int) -> str:
        """Take a token; the text that may now be shown."""
        self._count += 1
        text = "" if token in self._textless else self._stream.push(token)
        self._held += text
        rest = self._stop.push(token, text)
        if rest is not None and self._count > self._min_tokens:
            self.stopped = True
            return self._show(len(self._held) - rest)
        return self._show(len(self._held) - self._stop.possible)

    def finish(self) -> str:
        """The text that was held back and turned out not to stop anything."""
        if self.stopped:
            return ""
        self._held += self._stream.finish()
        return self._show(len(self._held))

    def _tail(self, tokens: TokenBytes, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt that leave text."""
        tail: list[int] = []
        for token in reversed(prompt):
            if len(tail) == _TAIL:
                break
            if token not in self._textless and tokens[token]:
                tail.insert(0, token)
        return tail

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> tuple[TokenBytes, dict[int, str]]:
    """What tokens stand for, and what those would spell that leave no text; read once for all outputs."""
    text_of = tokenizer.backend_tokenizer.id_to_token
    return TokenBytes(tokenizer), {token: text_of(token) for token in textless_token_ids(tokenizer)}
