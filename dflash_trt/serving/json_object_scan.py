"""One JSON object as its text comes: where it ends, and what its members are so far."""

from __future__ import annotations

import json
from typing import Literal

_OUTSIDE_STRINGS = frozenset(' \t\r\n{}[]:,"+-.0123456789eE' + "truefalsn")


class JsonObjectScan:
    """Follows strings and brackets from the opening brace on; whether what they enclose is JSON is not its business.

    It breaks at a character that JSON allows in no object, so that what cannot become one is noticed soon.
    """

    def __init__(self) -> None:
        self.text = ""
        """What belongs to the object."""
        self.state: Literal["open", "closed", "broken"] = "open"
        self.values: dict[str, str] = {}
        """The texts of members whose values are whole."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._boundary = 0
        """Where the current member began."""
        self._key: str | None = None
        """Its name, once read, while its value is not whole."""

    @property
    def keys(self) -> list[str]:
        """The names of members so far."""
        return [*self.values, *([] if self._key is None else [self._key])]

    def value(self, key: str) -> str:
        """The text of a member's value so far."""
        return self.text[self._boundary :].lstrip() if key == self._key else self.values.get(key, "")

    def push(self, text: str) -> str:
        """Take what belongs to the object, while it is open; the rest of the text."""
        start = len(self.text)
        self.text += text
        for at in range(start, len(self.text)):
            if not self._take(at):
                self.state = "broken"
                return self._cut(at)
            if self._depth == 0:
                self.state = "closed"
                return self._cut(at + 1)
        return ""

    def _cut(self, end: int) -> str:
        self.text, rest = self.text[:end], self.text[end:]
        return rest

    def _take(self, at: int) -> bool:
        character = self.text[at]
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
            return character >= " "
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 1:
                self._boundary = at + 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._end_value(at + 1)
            elif self._depth == 0:
                self._end_value(at)
        elif self._depth == 1 and character == ":":
            return self._start_value(at)
        elif self._depth == 1 and character == ",":
            self._end_value(at)
            self._boundary = at + 1
        return character in _OUTSIDE_STRINGS

    def _start_value(self, at: int) -> bool:
        try:
            self._key = json.loads(self.text[self._boundary : at])
        except ValueError:
            return False
        self._boundary = at + 1
        return isinstance(self._key, str)

    def _end_value(self, at: int) -> None:
        if self._key is not None:
            self.values[self._key] = self.text[self._boundary : at].strip()
            self._key = None
