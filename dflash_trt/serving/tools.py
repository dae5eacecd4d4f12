"""The tools that a request offers, and which of them the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.serving.invalid_field import InvalidField

FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    strict: bool
    """Arguments must match the schema whenever it is called, not only when it must be called."""
    definition: Mapping[str, Any]
    """As the request gives it, which is how chat templates take it."""


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    """"named" leaves only the named one to be called, once."""
    callable_tools: tuple[Tool, ...] = ()
    """Those that may be called."""
    parallel: bool = True
    """An answer may call several."""

    @property
    def must_call(self) -> bool:
        """The answer has to be a call."""
        return self.choice in ("required", "named")

    @property
    def definitions(self) -> list[Mapping[str, Any]] | None:
        """What the chat template gets; None where no tool is offered. They are shown under "none" too, as in vLLM."""
        return [tool.definition for tool in self.tools] or None


def read_tool_use(tools: object, tool_choice: object, parallel_tool_calls: bool | None) -> ToolUse:
    """Read the fields of a request that concern tools, each as JSON gives it.

    Args:
        tools: list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}, or None.
        tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name"}}; None is "auto" where
            there are tools.
        parallel_tool_calls: None is True.

    Raises:
        InvalidField: naming the field.
    """
    offered = tuple(_read_tools(tools))
    parallel = parallel_tool_calls is not False
    if isinstance(tool_choice, Mapping):
        return ToolUse(offered, "named", (_named(offered, tool_choice),), parallel=False)
    if tool_choice is not None and tool_choice not in _MODES:
        raise InvalidField(
            "tool_choice", f"is {tool_choice!r}, it must be one of {', '.join(_MODES)}, or name a function"
        )
    if not offered and tool_choice == "required":
        raise InvalidField("tool_choice", "is 'required', which needs tools")
    if not offered or tool_choice == "none":
        return ToolUse(offered)
    return ToolUse(offered, "required" if tool_choice == "required" else "auto", offered, parallel)


def _read_tools(tools: object) -> list[Tool]:
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidField("tools", "must be a list")
    read = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in seen:
            raise InvalidField(f"tools[{index}].function.name", f"is {tool.name!r}, as that of another tool")
        seen.add(tool.name)
    return read


def _read_tool(tool: object, field: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidField(field, "must be an object")
    if tool.get("type") != "function":
        raise InvalidField(f"{field}.type", f"is {tool.get('type')!r}, it must be 'function'")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidField(f"{field}.function", "must be an object")
    name, strict, description = function.get("name"), function.get("strict"), function.get("description")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise InvalidField(f"{field}.function.name", f"is {name!r}, it must be 1 to 64 letters, digits, _ or -")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidField(f"{field}.function.strict", f"is {strict!r}, it must be true or false")
    if description is not None and not isinstance(description, str):
        raise InvalidField(f"{field}.function.description", "must be a text")
    parameters = _read_schema(function.get("parameters"), f"{field}.function.parameters")
    return Tool(name, parameters, bool(strict), tool)


def _read_schema(schema: object, field: str) -> Mapping[str, Any]:
    if schema is None:
        return {"type": "object"}
    if not isinstance(schema, Mapping):
        raise InvalidField(field, "must be a JSON schema, an object")
    if schema.get("type", "object") != "object":
        raise InvalidField(f"{field}.type", f"is {schema['type']!r}, it must be 'object': arguments have names")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidField(f"{field}.properties", "must be an object")
    return {"type": "object", **schema}


def _named(offered: Sequence[Tool], tool_choice: Mapping[str, Any]) -> Tool:
    function = tool_choice.get("function")
    if tool_choice.get("type") != "function" or not isinstance(function, Mapping):
        raise InvalidField("tool_choice", "must be a text, or {'type': 'function', 'function': {'name': ...}}")
    for tool in offered:
        if tool.name == function.get("name"):
            return tool
    names = ", ".join(tool.name for tool in offered) or "none"
    raise InvalidField("tool_choice.function.name", f"is {function.get('name')!r}, which no tool has; they are {names}")
