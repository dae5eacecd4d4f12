"""The formats that a model speaks, by its chat template: how it calls tools, and whether it thinks first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.serving.answer_grammar import answer_grammar, holds_calls
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.reasoning import END_THINK, ReasoningParser, Thinking, thinking_after
from dflash_trt.serving.tool_calls import HERMES, LLAMA, PARSERS, Piece, ToolCallDelta, ToolCallParser, ToolFormat
from dflash_trt.serving.tools import ToolUse


@dataclass(frozen=True)
class Deltas:
    """What came of an answer. Reasoning comes before content, and a call after the content before it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass
class ParsedAnswer:
    """The deltas of an answer put together."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As OpenAI's messages have them."""

    def add(self, deltas: Deltas) -> None:
        """Take what came next."""
        self.reasoning += deltas.reasoning
        self.content += deltas.content
        for delta in deltas.tool_calls:
            if delta.name is not None:
                function = {"name": delta.name, "arguments": ""}
                self.tool_calls.append({"id": delta.id, "type": "function", "function": function})
            self.tool_calls[delta.index]["function"]["arguments"] += delta.arguments


class AnswerParser:
    """Divides one answer's text into reasoning, content and tool calls, the same however the text is cut."""

    def __init__(self, reasoning: ReasoningParser, tool_calls: ToolCallParser | None) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls

    @property
    def called(self) -> bool:
        """The answer calls a tool: where it would end with "stop", its finish reason is "tool_calls"."""
        return self._tool_calls is not None and self._tool_calls.calls > 0

    def push(self, text: str) -> Deltas:
        """Take more of the answer; what is decided by it, possibly nothing."""
        reasoning, rest = self._reasoning.push(text)
        return _deltas(reasoning, self._divide(rest))

    def finish(self, *, cut: bool) -> Deltas:
        """What the end of the answer decides; it is `cut` where the model would have gone on."""
        reasoning, rest = self._reasoning.finish()
        pieces = self._divide(rest)
        return _deltas(reasoning, pieces if self._tool_calls is None else pieces + self._tool_calls.finish(cut=cut))

    def _divide(self, text: str) -> list[Piece]:
        return [text] if self._tool_calls is None else self._tool_calls.push(text)


def _deltas(reasoning: str, pieces: list[Piece]) -> Deltas:
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return Deltas(reasoning, content, tuple(piece for piece in pieces if not isinstance(piece, str)))


@dataclass(frozen=True)
class AnswerFormat:
    """What one request's answers are held to, and how they are read."""

    structured_outputs: StructuredOutputs | Lark | None
    """For the sampling parameters."""
    new_parser: Callable[[], AnswerParser]
    """Each answer needs one of its own."""


@dataclass(frozen=True)
class Formats:
    """What a chat template says of the formats that its model speaks."""

    tools: ToolFormat | None
    """None: the template shows the model no tools, or has it call them in a way that is not known here."""
    thinks: bool

    def require_tools(self, use: ToolUse) -> None:
        """See that the model can be shown tools, where a request offers some.

        Raises:
            InvalidField: it cannot.
        """
        if use.tools and self.tools is None:
            raise InvalidField(
                "tools", "the model's chat template has no tools in the formats of Hermes, Qwen3 or Llama 3"
            )

    def answer_format(self, use: ToolUse, prompt_tail: str, asked: StructuredOutputs | None) -> AnswerFormat:
        """The format of a request's answers.

        Args:
            use: what the request says of tools.
            prompt_tail: the end of the prompt as the template wrote it, special tokens included, 20 characters or more.
            asked: the form that the request asks for besides.

        Raises:
            InvalidField: the model's template has no tools, or a part of a schema cannot be enforced.
        """
        self.require_tools(use)
        thinking: Thinking = thinking_after(prompt_tail) if self.thinks else "none"
        parser = PARSERS[self.tools] if self.tools is not None and use.callable_tools else None
        names, valid = frozenset(tool.name for tool in use.callable_tools), holds_calls(use, asked)

        def new_parser() -> AnswerParser:
            return AnswerParser(
                ReasoningParser(thinking),
                None if parser is None else parser(names, required=use.must_call, valid=valid),
            )

        return AnswerFormat(answer_grammar(use, self.tools, thinking, asked), new_parser)


@lru_cache(maxsize=16)
def formats_of(chat_template: str | None) -> Formats:
    """What a model speaks, by the words of its chat template; None is no template."""
    template = chat_template or ""
    tools = None
    if "tools" in template:
        if "<tool_call>" in template and '"arguments"' in template:
            tools = HERMES
        elif "ipython" in template and '"parameters"' in template:
            tools = LLAMA
    return Formats(tools, END_THINK in template)
