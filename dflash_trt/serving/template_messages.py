"""The messages of a conversation as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.checkpoint.message_forms import Message
from dflash_trt.serving.invalid_field import InvalidField

_ROLES = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI's messages, each as JSON gives it, as chat templates read them.

    Contents become one text: templates look into it. The arguments of calls become objects, because templates write
    them as JSON; those of an answer that was cut, which are no JSON, stay text. Keys that hold nothing are left out,
    because templates look whether they are there. An assistant's `reasoning` is called `reasoning_content` in
    templates; a `refusal` is what it said.

    Raises:
        InvalidField: naming the field.
    """
    if not messages:
        raise InvalidField("messages", "is empty; it needs at least one")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], field: str) -> Message:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidField(f"{field}.role", f"is {role!r}, it must be one of {', '.join(_ROLES)}")
    calls, content = message.get("tool_calls"), message.get("content")
    if role == "assistant":
        content = content or message.get("refusal") or ""
    read: Message = {"role": role, "content": _content(content, f"{field}.content")}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            read[key] = message[key]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        read["reasoning_content"] = reasoning
    if calls:
        if role != "assistant":
            raise InvalidField(f"{field}.tool_calls", f"only an assistant calls tools, not {role!r}")
        read["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return read


def _content(content: object, field: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(_text(part, f"{field}[{index}]") for index, part in enumerate(content))
    raise InvalidField(field, "must be a text, or a list of parts of type 'text'")


def _text(part: object, field: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidField(field, "must be {'type': 'text', 'text': ...}; the models served here read nothing else")
    return str(part["text"])


def _call(call: object, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise InvalidField(field, "must be {'id': ..., 'type': 'function', 'function': {'name', 'arguments'}}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise InvalidField(f"{field}.function.name", "must be a text")
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}


def _arguments(arguments: object) -> dict[str, Any] | str:
    """An object where the text is one that a template can write as JSON."""
    if not isinstance(arguments, str) or not arguments:
        return arguments if isinstance(arguments, dict) else {}
    try:
        values = json.loads(arguments)
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # cut, or with half a character: both are given out
        return arguments
    return {} if values is None else values if isinstance(values, dict) else arguments
