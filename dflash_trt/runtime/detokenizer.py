"""Token ids to text as they come, and the texts that end an output."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class Detokenizer:
    """Decodes one output token by token.

    Text that may yet become part of a stop text is held back, so what was shown is never taken back. Tokens that end
    inside a character yield nothing until it is whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: Sequence[str]) -> None:
        self.text = ""
        """What may be shown."""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int) -> str:
        """Take a token; the text that may now be shown."""
        self._tokens.append(token)
        self._held += self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._show(min(found))
        return self._show(len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """The text that was held back and turned out not to stop anything."""
        if self.stopped:
            return ""
        # The stream keeps an unfinished character to itself; decoding the whole shows it as the tokenizer does.
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if whole.startswith(self.text + self._held):
            self._held = whole[len(self.text) :]
        return self._show(len(self._held))

    def _show(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown

    def _possible_stop(self) -> int:
        """Characters at the end that begin a stop text."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
