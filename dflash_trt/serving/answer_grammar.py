"""The form that an answer is held to: calls in a family's own format, or what a request asks for, after thinking."""

from __future__ import annotations

from dflash_trt.runtime.lark import Lark, json_lark, lark
from dflash_trt.runtime.regular_expression import literal
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.runtime.unsupported_schema import UnsupportedSchema, shown
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.reasoning import END_THINK, THINK, Thinking
from dflash_trt.serving.tool_calls import ToolFormat
from dflash_trt.serving.tools import Tool, ToolUse

_AFTER_THINKING = "\n\n"


def answer_grammar(
    use: ToolUse, tool_format: ToolFormat | None, thinking: Thinking, asked: StructuredOutputs | None
) -> StructuredOutputs | Lark | None:
    """What holds an answer to its form; None where it may be anything.

    Where a tool must be called, the form that is asked for does not count; where one may be called, the answer is
    calls, or has that form.

    Raises:
        InvalidField: a tool's schema has a part that cannot be enforced.
        InvalidForm: so has what is asked for.
    """
    if tool_format is not None and holds_calls(use, asked):
        body = _calls(use, tool_format, asked)
    elif asked is None or thinking == "none":
        return asked
    else:
        body = lark(asked)
    return body if thinking == "none" else _after_thinking(thinking, body)


def holds_calls(use: ToolUse, asked: StructuredOutputs | None) -> bool:
    """The grammar of an answer sees to it that its calls are well-formed."""
    strict = any(tool.strict for tool in use.callable_tools)
    return bool(use.callable_tools) and (use.must_call or strict or not use.parallel or asked is not None)


def _calls(use: ToolUse, tool_format: ToolFormat, asked: StructuredOutputs | None) -> Lark:
    """Rule `call`: one call, without what all calls begin with; `text`, where there may be any, goes up to that."""
    calls = " | ".join(_call(tool, use, tool_format) for tool in use.callable_tools)
    if not use.must_call and asked is None:
        rules = (
            f"call: {calls}\n"
            f"TEXT: {_text_without(tool_format.trigger, THINK, END_THINK)}\n"
            f"CALLED: TEXT /{literal(tool_format.trigger)}/\n"
        )
        return Lark("(CALLED call)* TEXT" if use.parallel else "TEXT | CALLED call", rules)
    opening = f"/{literal(tool_format.trigger)}/"
    more = f" (/{literal(tool_format.separator + tool_format.trigger)}/ call)*" if use.parallel else ""
    rules = f"call: {calls}\n"
    if use.must_call or asked is None:
        return Lark(f"{opening} call{more}", rules)
    other = lark(asked)
    return Lark(f"{opening} call{more} | {other.expression}", rules + other.rules)


def _call(tool: Tool, use: ToolUse, tool_format: ToolFormat) -> str:
    schema = dict(tool.parameters) if use.must_call or tool.strict else {"type": "object"}
    try:
        arguments = json_lark(schema)
    except UnsupportedSchema as error:
        field = f"tools[{use.tools.index(tool)}].function.parameters{shown(error.path)}"
        raise InvalidField(field, error.problem) from None
    begin = (tool_format.begin + tool.name + tool_format.middle).removeprefix(tool_format.trigger)
    return f"/{literal(begin)}/ {arguments.expression} /{literal(tool_format.end)}/"


def _after_thinking(thinking: Thinking, body: Lark) -> Lark:
    """Thinking and its tags are one lexeme: it ends with its tag, whatever may come next."""
    opening = f"/{literal(THINK)}/ " if thinking == "possible" else ""
    thought = f"THOUGHT: {opening}THINKING /{literal(END_THINK + _AFTER_THINKING)}/\n"
    rules = f"{thought}THINKING: {_text_without(THINK, END_THINK)}\nbody: {body.expression}\n{body.rules}"
    return Lark("THOUGHT body" if thinking == "open" else "THOUGHT body | body", rules)


def _text_without(*texts: str) -> str:
    return f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(literal, texts))})(?s:.*)/"
