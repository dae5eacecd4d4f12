"""What a model thinks before it answers, told from the answer while the text comes."""

from __future__ import annotations

from typing import Literal

from dflash_trt.serving.cut_tag import cut_tag_start

THINK = "<think>"
END_THINK = "</think>"

Thinking = Literal["none", "possible", "open"]
"""Where a prompt leaves it: over or not to be had; begun by the model if it likes; begun by the prompt."""


def thinking_after(prompt_tail: str) -> Thinking:
    """Where a prompt leaves the thinking of a model that thinks.

    Args:
        prompt_tail: the end of the prompt as its chat template wrote it, special tokens and all, 20 characters or more.
    """
    tail = prompt_tail.rstrip()
    return "open" if tail.endswith(THINK) else "none" if tail.endswith(END_THINK) else "possible"


class ReasoningParser:
    """Divides an answer's text into reasoning and the rest, the same however the text is cut.

    Lines left empty around the tags belong to neither. An answer that ends before its thinking does is all reasoning.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self._pending = ""
        self._at_start = thinking != "none"
        """Nothing but empty lines has come since the last tag."""

    def push(self, text: str) -> tuple[str, str]:
        """Take more of the answer: what is decided to be reasoning, and what of the rest."""
        self._pending += text
        if self._thinking == "possible":
            self._look_for_start()
        reasoning = self._take_reasoning() if self._thinking == "open" else ""
        rest = self._take_rest() if self._thinking == "none" else ""
        return reasoning, rest

    def finish(self) -> tuple[str, str]:
        """What the end of the answer decides."""
        left, self._pending = self._pending, ""
        return (left, "") if self._thinking == "open" else ("", left)

    def _look_for_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(THINK):
            self._thinking, self._pending = "open", text.removeprefix(THINK)
        elif not THINK.startswith(text):
            self._thinking, self._at_start = "none", False

    def _take_reasoning(self) -> str:
        if self._at_start:
            self._pending = self._pending.lstrip("\n")
            self._at_start = not self._pending
        text, tag, rest = self._pending.partition(END_THINK)
        if tag:
            self._thinking, self._pending, self._at_start = "none", rest, True
            return text.rstrip("\n")
        shown = text[: cut_tag_start(text, END_THINK)].rstrip("\n")
        self._pending = text[len(shown) :]
        return shown

    def _take_rest(self) -> str:
        text, self._pending = self._pending, ""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text
