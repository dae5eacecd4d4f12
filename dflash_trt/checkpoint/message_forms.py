"""How a chat template takes messages, found by rendering some, and whether it renders all that a conversation says.

Words of no meaning are put in the place of a conversation's texts: what of them is not in the rendered text, the
template drops.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
"""A turn of a conversation: "role", "content", and what else the chat template reads."""
Taken = Sequence[tuple[int, Message]]
"""Messages as a template takes them, each with the index of the one that it comes from."""
Render = Callable[[Sequence[Message]], str | None]
"""The text of a conversation; None where the template makes none of it."""
Place = tuple[int, str]
"""The index of a message and the path of a part of it."""


@dataclass(frozen=True)
class MessageForms:
    """What messages must look like for a template to render them."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Roles that it does not know, and those that stand for them."""
    in_parts: frozenset[str] = frozenset()
    """Roles whose content it reads as a list of parts, not as a text."""
    arguments_as_text: bool = False
    """It takes the arguments of calls as JSON text, not as an object."""
    one_call: bool = False
    """It renders only one call of a message."""
    content_apart: bool = False
    """It renders no content beside calls."""

    def apply(self, messages: Sequence[Message]) -> Taken:
        """Messages in these forms."""
        return [(index, self._formed(message)) for index, message in self._taken_apart(messages)]

    def _formed(self, message: Message) -> Message:
        role = dict(self.renamed).get(message["role"], message["role"])
        formed = {**message, "role": role}
        if role in self.in_parts:
            formed["content"] = [{"type": "text", "text": message["content"]}]
        if self.arguments_as_text and message.get("tool_calls"):
            formed["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return formed

    def _taken_apart(self, messages: Sequence[Message]) -> Taken:
        """Content goes before the calls beside it, and each of several calls before its own results."""
        left, apart = deque(enumerate(messages)), []
        while left:
            index, message = left.popleft()
            calls = message.get("tool_calls") or []
            if self.content_apart and calls and message["content"]:
                apart.append((index, {key: value for key, value in message.items() if key != "tool_calls"}))
                message = _bare(message)
            if not self.one_call or len(calls) < 2:
                apart.append((index, message))
                continue
            for call in calls:
                apart.append((index, {**message, "tool_calls": [call]}))
                message = _bare(message)
                while left and call.get("id") and left[0][1].get("tool_call_id") == call["id"]:
                    apart.append(left.popleft())
        return apart


def forms_of(template: str, render: Render) -> MessageForms:
    """The forms that a template renders best; those of OpenAI's messages, with arguments as objects, where it can.

    A template that writes whatever role it is given knows "developer" only if it names it.
    """
    forms = MessageForms()

    def shows(forms: MessageForms, messages: Sequence[Message], place: Place) -> bool:
        missing = dropped(render, forms.apply(messages))
        return missing is not None and place not in missing

    for role, (messages, at) in _EXAMPLES.items():
        in_parts = replace(forms, in_parts=forms.in_parts | {role})
        if not shows(forms, messages, (at, "content")) and shows(in_parts, messages, (at, "content")):
            forms = in_parts
    for role, other in (("developer", "system"), ("system", "developer")):
        knows = shows(forms, _EXAMPLES[role][0], (0, "content")) and (role == "system" or role in template)
        if not knows and shows(forms, _EXAMPLES[other][0], (0, "content")):
            forms = replace(forms, renamed=((role, other),))

    as_text = replace(forms, arguments_as_text=True)
    call = (1, "tool_calls[0]")
    as_object = shows(forms, _CALLS, call) and not _writes_python(render(_of(forms.apply(_CALLS))))
    if not as_object and shows(as_text, _CALLS, call):
        forms = as_text
    if not shows(forms, _CALLS, call):
        return forms
    for changed, messages, place in (
        (replace(forms, content_apart=True), _CALL_AND_CONTENT, (1, "content")),
        (replace(forms, one_call=True), _TWO_CALLS, (1, "tool_calls[1]")),
    ):
        if not shows(forms, messages, place) and shows(changed, messages, place):
            forms = replace(
                forms,
                content_apart=forms.content_apart or changed.content_apart,
                one_call=forms.one_call or changed.one_call,
            )
    return forms


def dropped(render: Render, messages: Taken) -> list[Place] | None:
    """What of a conversation a template does not render; None where the conversation's words are too little for it."""
    words: list[tuple[Place, str]] = []

    def word(index: int, path: str) -> str:
        words.append(((index, path), f"qz{len(words)}zq"))
        return words[-1][1]

    text = render([_in_words(message, lambda path, index=index: word(index, path)) for index, message in messages])  # type: ignore[misc]
    return None if text is None else [place for place, each in words if each not in text]


def _in_words(message: Message, word: Callable[[str], str]) -> Message:
    content, calls = message["content"], message.get("tool_calls")
    if isinstance(content, str):
        worded = {**message, "content": word("content") if content.strip() else content}
    else:
        parts = [{**part, "text": word("content") if part["text"].strip() else part["text"]} for part in content]
        worded = {**message, "content": parts}
    if calls:
        worded["tool_calls"] = [_call_in_words(call, word, f"tool_calls[{at}]") for at, call in enumerate(calls)]
    return worded


def _call_in_words(call: dict[str, Any], word: Callable[[str], str], path: str) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        arguments = {word(path): word(path)} if arguments else {}
    elif arguments.strip("{} \n"):
        arguments = json.dumps({word(path): word(path)})
    return {**call, "function": {"name": word(path), "arguments": arguments}}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _bare(message: Message) -> Message:
    """What is left of a message of which content and reasoning were taken."""
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": ""}


def _of(messages: Taken) -> list[Message]:
    return [message for _, message in messages]


def _writes_python(text: str | None) -> bool:
    """Arguments are written by Python's own rules, not as JSON."""
    return text is not None and repr(_ARGUMENT) in text and json.dumps(_ARGUMENT) not in text


_ARGUMENT = "qzargumentzq"


def _called(*ids: str, content: str = "") -> list[Message]:
    calls = [{"id": id, "type": "function", "function": {"name": id, "arguments": {_ARGUMENT: "x"}}} for id in ids]
    results = [{"role": "tool", "content": "result", "name": id, "tool_call_id": id} for id in ids]
    return [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *results,
    ]


_IDS = ("abcdefgh1", "abcdefgh2")
"""Nine letters and digits, which Mistral's templates want."""
_CALLS = _called(_IDS[0])
_CALL_AND_CONTENT = _called(_IDS[0], content="say")
_TWO_CALLS = _called(*_IDS)
_USER = {"role": "user", "content": "ask"}
_EXAMPLES: dict[str, tuple[list[Message], int]] = {
    "user": ([_USER], 0),
    "system": ([{"role": "system", "content": "be"}, _USER], 0),
    "developer": ([{"role": "developer", "content": "be"}, _USER], 0),
    "assistant": ([_USER, {"role": "assistant", "content": "answer"}, _USER], 1),
    "tool": (_CALLS, 2),
}
"""For each role a conversation, and where in it the role speaks. The user's is first: all others have it."""
