"""Tokens to text as they come, after those of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dflash_trt.checkpoint.token_bytes import TokenBytes

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_EACH_BYTE = "dflash_trt.each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream:
    """Decodes one output token by token, as the tokenizer would decode prompt and output together.

    The beginning of a character yields nothing until it is whole. Bytes that are no UTF-8 become replacement
    characters: one for as many as might have begun a character where every token is bytes, one for each with byte
    fallback. There the tokenizer would also replace whole characters of the same run of bytes, which have been shown.

    Args:
        tokens: what tokens stand for.
        prompt: the tokens that leave text of what stands before the output, or the last of them.
    """

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int]) -> None:
        self._tokens = tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if tokens.is_byte_level else _EACH_BYTE)
        self._at_start = True
        self._of_prompt = ""
        """Replacement characters that the prompt's own text ends with, for a character that the output may go on."""
        for token in prompt:
            self._decode(token)
        self._of_prompt = self._utf8.getstate()[0].decode("utf-8", self._utf8.errors)

    def push(self, token: int) -> str:
        """Take a token; the text that is whole now."""
        return self._own(self._decode(token))

    def finish(self) -> str:
        """What bytes become that were the beginning of a character."""
        return self._own(self._utf8.decode(b"", final=True))

    def _decode(self, token: int) -> str:
        content = self._tokens.first(token) if self._at_start else self._tokens[token]
        self._at_start &= not self._tokens[token]
        return self._utf8.decode(content)

    def _own(self, text: str) -> str:
        if text and self._of_prompt:
            text, self._of_prompt = text.removeprefix(self._of_prompt), ""
        return text
