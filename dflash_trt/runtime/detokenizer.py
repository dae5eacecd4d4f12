"""Token ids to text as they come, and the texts that end an output."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for bytes that are no whole character, or not yet."""


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
        self._stop = tuple(stop)
        self._held = ""
        self._window: list[int] = []
        """Tokens whose text was last found whole, then those whose text was not."""
        self._whole = 0
        """How many of the window's tokens are of the first kind; they give the others their left context."""

    def push(self, token: int) -> str:
        """Take a token; the text that may now be shown."""
        self._window.append(token)
        self._decode(final=False)
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._show(min(found))
        return self._show(len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """The text that was held back and turned out not to stop anything."""
        if self.stopped:
            return ""
        self._decode(final=True)
        return self._show(len(self._held))

    def _decode(self, *, final: bool) -> None:
        """Hold the window's new text, once it ends in a whole character or nothing more is to come."""
        before, after = self._text(self._window[: self._whole]), self._text(self._window)
        if len(after) > len(before) and (final or not after.endswith(_UNFINISHED)):
            self._held += after[len(before) :]
            del self._window[: self._whole]
            self._whole = len(self._window)

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

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
