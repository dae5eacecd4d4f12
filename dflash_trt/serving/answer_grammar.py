"""The form that an answer is held to: calls in a family's own format, or what a request asks for, after thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xgrammar import Grammar, StructuralTag
from xgrammar.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    JSONSchemaFormat,
    OptionalFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TriggeredTagsFormat,
)

from dflash_trt.runtime.structured import MOST_WHITESPACE, StructuredOutputs
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.reasoning import END_THINK, THINK, Thinking
from dflash_trt.serving.tool_calls import ToolFormat
from dflash_trt.serving.tools import Tool, ToolUse

_AFTER_THINKING = "\n\n"


def answer_grammar(
    use: ToolUse, tool_format: ToolFormat | None, thinking: Thinking, asked: StructuredOutputs | None, field: str
) -> StructuredOutputs | None:
    """What holds an answer to its form; None where it may be anything.

    Where a tool must be called, the form that is asked for does not count; where one may be called, the answer is
    calls, or has that form.

    Args:
        field: of the request, which asks for that form.

    Raises:
        InvalidField: a tool's schema is one that no grammar can be made of, or so is what is asked for.
    """
    with _refusals(field):
        if tool_format is not None and holds_calls(use, asked):
            body = _calls(use, tool_format, asked)
        elif asked is None or thinking == "none":
            return asked
        else:
            body = _asked(asked)
        form = body if thinking == "none" else SequenceFormat(elements=[_thinking(thinking), body])
        return StructuredOutputs(grammar=str(Grammar.from_structural_tag(StructuralTag(format=form))))


def holds_calls(use: ToolUse, asked: StructuredOutputs | None) -> bool:
    """The grammar of an answer sees to it that its calls are well-formed."""
    strict = any(tool.strict for tool in use.callable_tools)
    return bool(use.callable_tools) and (use.must_call or strict or not use.parallel or asked is not None)


def _calls(use: ToolUse, tool_format: ToolFormat, asked: StructuredOutputs | None) -> Format:
    tags = [_call(tool, use, tool_format) for tool in use.callable_tools]
    if not use.must_call and asked is None:
        return TriggeredTagsFormat(
            triggers=[tool_format.trigger],
            tags=tags,
            excludes=[THINK, END_THINK],
            stop_after_first=not use.parallel,
        )
    calls = TagsWithSeparatorFormat(
        tags=tags, separator=tool_format.separator, at_least_one=True, stop_after_first=not use.parallel
    )
    return calls if use.must_call or asked is None else OrFormat(elements=[calls, _asked(asked)])


def _call(tool: Tool, use: ToolUse, tool_format: ToolFormat) -> TagFormat:
    schema = dict(tool.parameters) if use.must_call or tool.strict else {"type": "object"}
    with _refusals(f"tools[{use.tools.index(tool)}].function.parameters"):
        Grammar.from_json_schema(json.dumps(schema))
    begin = tool_format.begin + tool.name + tool_format.middle
    return TagFormat(begin=begin, content=_json(schema), end=tool_format.end)


def _asked(asked: StructuredOutputs) -> Format:
    if asked.json is not None:
        return _json(json.loads(asked.json) if isinstance(asked.json, str) else dict(asked.json))
    if asked.regex is not None:
        return RegexFormat(pattern=asked.regex)
    if asked.choice is not None:
        return OrFormat(elements=[ConstStringFormat(value=text) for text in asked.choice])
    if asked.grammar is not None:
        return GrammarFormat(grammar=asked.grammar)
    return _json({"type": "object"})


def _json(schema: dict[str, Any]) -> JSONSchemaFormat:
    return JSONSchemaFormat(json_schema=schema, max_whitespace_cnt=MOST_WHITESPACE)


def _thinking(thinking: Thinking) -> Format:
    begin = "" if thinking == "open" else THINK
    thought = TagFormat(begin=begin, content=AnyTextFormat(excludes=[THINK, END_THINK]), end=END_THINK)
    both = SequenceFormat(elements=[thought, ConstStringFormat(value=_AFTER_THINKING)])
    return both if thinking == "open" else OptionalFormat(content=both)


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """What xgrammar refuses in the block is the field's fault."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = re.sub(r"^\[[\d:]+\] \S+ ", "", str(error)).strip()  # without the time and xgrammar's own line
        raise InvalidField(field, f"cannot be made a grammar ({reason})") from None
