"""What a request says of tools, read or refused by the name of the field."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.tools import read_tool_use


def tool(name: object, **function: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "b"}}


def test_choices() -> None:
    tools = [tool("a"), tool("b", parameters={"properties": {"x": {}}}, strict=True)]
    use = read_tool_use(tools, None, None)
    assert (use.choice, use.parallel, use.must_call) == ("auto", True, False)
    assert [(each.name, each.strict) for each in use.callable_tools] == [("a", False), ("b", True)]
    assert use.callable_tools[1].parameters == {"type": "object", "properties": {"x": {}}}
    assert use.definitions == tools
    named = read_tool_use(tools, NAMED, None)
    assert named.must_call and not named.parallel and [each.name for each in named.callable_tools] == ["b"]
    none = read_tool_use(tools, "none", None)
    assert none.definitions == tools and not none.callable_tools
    assert not read_tool_use(tools, "required", False).parallel
    for absent in (None, []):
        assert read_tool_use(absent, "auto", None).definitions is None


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (5, None, "tools: must be a list"),
        ("ab", None, "tools: must be a list"),
        ([3], None, r"tools\[0\]: must be an object"),
        ([tool("a"), {"type": "custom"}], None, r"tools\[1\]\.type: is 'custom', it must be 'function'"),
        ([{"type": "function"}], None, r"tools\[0\]\.function: must be an object"),
        ([tool("a"), tool("b c")], None, r"tools\[1\]\.function\.name: is 'b c', it must be 1 to 64 letters"),
        ([tool("a" * 65)], None, r"tools\[0\]\.function\.name"),
        ([tool("a\n")], None, r"tools\[0\]\.function\.name"),
        ([tool(None)], None, r"tools\[0\]\.function\.name: is None"),
        ([tool("a"), tool("a")], None, r"tools\[1\]\.function\.name: is 'a', as that of another tool"),
        ([tool("a", strict=1)], None, r"tools\[0\]\.function\.strict"),
        ([tool("a", description=1)], None, r"tools\[0\]\.function\.description"),
        ([tool("a", parameters=[])], None, r"tools\[0\]\.function\.parameters: must be a JSON schema"),
        ([tool("a", parameters={"type": "array"})], None, r"tools\[0\]\.function\.parameters\.type: is 'array'"),
        ([tool("a", parameters={"properties": []})], None, r"tools\[0\]\.function\.parameters\.properties"),
        ([tool("a")], "some", "tool_choice: is 'some', it must be one of none, auto, required, or name a function"),
        ([tool("a")], {"type": "function"}, "tool_choice: must be a text"),
        ([tool("a")], NAMED, "tool_choice.function.name: is 'b', which no tool has; they are a"),
        (None, NAMED, "tool_choice.function.name: is 'b', which no tool has; they are none"),
        (None, "required", "tool_choice: is 'required', which needs tools"),
    ],
)
def test_refusals_name_the_field(tools: object, choice: object, message: str) -> None:
    with pytest.raises(InvalidField, match=f"^{message}") as refusal:
        read_tool_use(tools, choice, None)
    assert str(refusal.value).startswith(f"{refusal.value.field}: ")
