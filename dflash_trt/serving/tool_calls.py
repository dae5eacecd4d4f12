"""Tool calls in the text of an answer, found while it comes."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from dflash_trt.serving.cut_tag import cut_tag_start
from dflash_trt.serving.json_object_scan import JsonObjectScan

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = (_NAME, *_ARGUMENTS, "type", "id")


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes a call: `begin`, the function's name, `middle`, its arguments in JSON, `end`."""

    begin: str
    middle: str
    end: str
    separator: str
    """Between calls."""
    trigger: str
    """What a call begins with, whichever function it calls."""


HERMES = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "<tool_call>")
"""Qwen3's, too."""
LLAMA = ToolFormat('{"name": "', '", "parameters": ', "}", "; ", '{"name": ')
"""Of Llama 3.1 and later."""


@dataclass(frozen=True)
class ToolCallDelta:
    """What came of a call. The first of each call has its id and name, the others more of its arguments' text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As OpenAI's streams have it."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Piece = str | ToolCallDelta
"""Content, or part of a call."""


class ToolCallParser(ABC):
    """Divides an answer's text into content and calls, the same however the text is cut.

    What is no call of a tool that was offered, or is none because its JSON is malformed, is content. White space around
    calls is neither. A call without arguments has `{}`.

    Args:
        names: of the tools that may be called.
        required: the answer is calls and nothing else.
        valid: a grammar sees to it that calls are well-formed. Their arguments then come as they are written; otherwise
            a call comes as a whole, when it has proved to be one.
    """

    opening: str
    """What stands before calls and is no content where an answer is cut behind it."""
    closing: str
    """What may follow a call and belongs to it."""

    def __init__(self, names: Collection[str], *, required: bool, valid: bool) -> None:
        self.calls = 0
        """Calls found so far."""
        self._names = names
        self._required = required
        self._valid = valid
        self._pending = ""
        """Text that nothing is decided about, from where no object is under way."""
        self._before = ""
        """What stands before the object that is under way, and is content if the object is no call."""
        self._scan: JsonObjectScan | None = None
        self._sent: int | None = None
        """Characters of its arguments that were given out; None before its name was."""
        self._refused = False
        """Something has proved to be no call."""
        self._after: str | None = None
        """Behind a call: what may still follow as part of it."""

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer; what is decided by it."""
        self._pending += text
        pieces: list[Piece] = []
        while self._pending and self._advance(pieces):
            pass
        return pieces

    def finish(self, *, cut: bool) -> list[Piece]:
        """What the end of the answer decides.

        Args:
            cut: the model would have gone on. A call that is under way is then a call as far as its arguments go, and
                nothing where they have not begun.
        """
        pieces: list[Piece] = []
        if cut and self._scan is not None:
            self._give_out(self._scan, pieces)
        left = self._pending if self._after is None else self._pending.lstrip()
        if self._scan is not None and self._sent is None:
            left = self._before + self._scan.text
        if cut and self._is_begun_call(left):
            left = ""
        return [*pieces, left] if left else pieces

    def _is_begun_call(self, left: str) -> bool:
        """The end of a cut answer is of a call, for all that can be seen of it."""
        if self._required or self._after is not None:
            return True
        if self._scan is not None:
            return self._may_be_call(self._scan)
        tag = left.strip()
        return len(tag) > 1 and self.opening.startswith(tag)

    def _advance(self, pieces: list[Piece]) -> bool:
        """Decide a little more; False where that takes more text."""
        if self._scan is not None:
            return self._read_object(self._scan, pieces)
        if self._after is not None:
            return self._skip_closing(self._after)
        return self._find_object(pieces)

    @abstractmethod
    def _find_object(self, pieces: list[Piece]) -> bool:
        """Give out content, up to where an object begins that may be a call."""

    def _skip_closing(self, closing: str) -> bool:
        self._pending = self._pending.lstrip()
        if not self._pending or (closing.startswith(self._pending) and self._pending != closing):
            return False
        if closing and self._pending.startswith(closing):
            self._pending, self._after = self._pending[len(closing) :], ""
        else:
            self._after = None
        return True

    def _start_object(self, at: int) -> bool:
        self._before, self._pending = self._pending[:at], self._pending[at:]
        self._scan, self._sent = JsonObjectScan(), None
        return True

    def _read_object(self, scan: JsonObjectScan, pieces: list[Piece]) -> bool:
        self._pending = scan.push(self._pending)
        if self._valid or (scan.state == "closed" and _is_call(scan.text)):
            self._give_out(scan, pieces)
        hopeless = scan.state == "broken" or scan.keys[:1] not in ([], *([key] for key in _CALL_KEYS))
        if scan.state == "open" and not hopeless:
            return False
        self._scan = None
        if self._sent is not None:
            self._after = self.closing
        else:
            self._refused = True
            pieces.append(self._before)
            self._pending = scan.text + self._pending
        return True

    def _give_out(self, scan: JsonObjectScan, pieces: list[Piece]) -> None:
        """What is new of a call, once its name and the beginning of its arguments are there."""
        arguments = _arguments_of(scan)
        if arguments is None or _NAME not in scan.values:
            return
        if self._sent is None:
            name = next((name for name in self._names if json.dumps(name) == scan.values[_NAME]), None)
            if name is None:
                return
            pieces.append(ToolCallDelta(self.calls, id=f"call_{secrets.token_hex(12)}", name=name))
            self.calls += 1
            self._sent = 0
        if len(arguments) > self._sent:
            pieces.append(ToolCallDelta(self.calls - 1, arguments[self._sent :]))
            self._sent = len(arguments)

    def _may_be_call(self, scan: JsonObjectScan) -> bool:
        """An object that is not whole would be a call of an offered tool, for all that can be seen of it."""
        if _NAME not in scan.keys:
            return bool(self._before.strip())
        key = next((key for key in scan.keys if key in _ARGUMENTS), None)
        value = "" if key is None else scan.value(key)
        return any(json.dumps(name).startswith(scan.value(_NAME).strip()) for name in self._names) and (
            value.startswith("{") or "null".startswith(value)
        )


class HermesParser(ToolCallParser):
    """Calls in tags, anywhere in an answer."""

    opening = HERMES.trigger
    closing = "</tool_call>"

    def _find_object(self, pieces: list[Piece]) -> bool:
        at = self._pending.find(self.opening)
        content = self._pending[: cut_tag_start(self._pending, self.opening) if at < 0 else at].rstrip()
        if content:
            pieces.append(content)
            self._pending = self._pending[len(content) :]
            at -= len(content)
        if at < 0:
            return False
        inside = at + len(self.opening)
        body = self._pending[inside:].lstrip()
        if body.startswith("{"):
            return self._start_object(len(self._pending) - len(body))
        if body:
            pieces.append(self._pending[:inside])
            self._pending = self._pending[inside:]
        return bool(body)


class LlamaParser(ToolCallParser):
    """Calls from the beginning of an answer on; one that begins otherwise has none."""

    opening = "<|python_tag|>"
    closing = ";"

    def _find_object(self, pieces: list[Piece]) -> bool:
        body = self._pending.lstrip().removeprefix(self.opening).lstrip()
        if body.startswith("{") and not self._refused:
            return self._start_object(len(self._pending) - len(body))
        if self.opening.startswith(body) and not self._refused:
            return False
        self._refused = True
        pieces.append(self._pending)
        self._pending = ""
        return True


PARSERS: dict[ToolFormat, type[ToolCallParser]] = {HERMES: HermesParser, LLAMA: LlamaParser}


def _arguments_of(scan: JsonObjectScan) -> str | None:
    """The text of a call's arguments as far as it goes; None before it begins."""
    key = next((key for key in scan.keys if key in _ARGUMENTS), None)
    if key is None:
        return "{}" if scan.state == "closed" and set(scan.keys) <= set(_CALL_KEYS) else None
    value = scan.value(key)
    if value == "null" and key in scan.values:
        return "{}"
    return value if value.startswith("{") else None


def _is_call(text: str) -> bool:
    """A whole object that is JSON."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
