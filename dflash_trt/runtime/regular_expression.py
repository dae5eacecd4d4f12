"""Regular expressions rewritten for the grammar engine, which knows neither anchors nor Python's or ECMA's classes.

Python's own parser reads them. What is written has the same language, in a subset of the syntax of Rust's regex crate
that needs no escaping anywhere: letters, digits and structure as they are, everything else as `\\x{...}`.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_sre: Any = importlib.import_module("re._constants" if sys.version_info >= (3, 11) else "sre_constants")
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

MOST_REPETITIONS = 100_000
"""Of one part of an expression; the engine counts in 32 bits and gets slow long before."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ANYTHING = "(?s:.*)"
_KNOWN_FLAGS = re.UNICODE | re.DOTALL | re.VERBOSE | re.ASCII

_REFUSED = {
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a lookahead or lookbehind",
    "FAILURE": "a lookahead or lookbehind",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_ECMA_SPACE = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ECMA_ESCAPES = re.compile(
    r"\\(?!d|D|w|W|s|S|t|n|v|f|r|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|0(?![0-9])|[\^$\\.*+?()\[\]{}|/-]|b|B|[1-9]|k<)"
)
_PYTHON_ONLY = re.compile(r"(?:\\.|[^\\])*?(?P<found>\[\^?\]|\(\?(?![:=!<])|\{,)", re.DOTALL)


class UnsupportedRegex(ValueError):
    """The expression is malformed, or has a part whose meaning cannot be kept; one line that says which."""


def python_fullmatch(pattern: str) -> str:
    """What matches the texts that Python's `re.fullmatch` matches.

    Raises:
        UnsupportedRegex: it cannot be written.
    """
    return _write(pattern, _PYTHON, around="")


def ecma_search(pattern: str) -> str:
    """What matches the whole of each text in which an ECMA-262 expression, as JSON schemas have it, is found.

    Raises:
        UnsupportedRegex: it cannot be written.
    """
    unknown, other = _ECMA_ESCAPES.search(pattern), _PYTHON_ONLY.match(pattern)
    if unknown:
        raise UnsupportedRegex(f"{pattern[unknown.start() : unknown.start() + 2]} is not supported")
    if other:
        raise UnsupportedRegex(f"{other['found']} is not supported")
    return _write(re.sub(r"((?:^|[^\\])(?:\\\\)*)\(\?<(?![=!])", r"\1(?P<", pattern), _ECMA, around=_ANYTHING)


def literal(text: str) -> str:
    """What matches this text."""
    return "".join(map(_character, map(ord, text)))


@dataclass(frozen=True)
class _Dialect:
    line_ends: str
    """What `.` does not match."""
    categories: dict[str, str]
    """Members of classes, for `d`, `w` and `s`; None: Python's own for texts."""


_ECMA = _Dialect(r"\n\r\x{2028}\x{2029}", {"d": "0-9", "w": "0-9A-Za-z_"})
_PYTHON = _Dialect(r"\n", {})


def _write(pattern: str, dialect: _Dialect, around: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = _parser.parse(pattern)
        flags = parsed.state.flags
        if flags & ~_KNOWN_FLAGS:
            raise UnsupportedRegex("flags other than s, x and a are not supported")
        return _Writer(dialect).sequence(list(parsed), flags, around, around)
    except re.error as error:
        raise UnsupportedRegex(error.msg if error.pos is None else f"{error.msg} at position {error.pos}") from None
    except (OverflowError, RecursionError):
        raise UnsupportedRegex("its parts are too large or too deep in one another") from None


class _Writer:
    """Writes what the parser made of an expression.

    `left` and `right` are what may stand beside a part where it reaches the ends of the expression, and None where it
    does not: only there may anchors stand.
    """

    def __init__(self, dialect: _Dialect) -> None:
        self._dialect = dialect

    def sequence(self, items: Sequence[tuple[Any, Any]], flags: int, left: str | None, right: str | None) -> str:
        items = list(items)
        while items and left is not None and _is_anchor(items[0], "AT_BEGINNING", "AT_BEGINNING_STRING"):
            left = ""
            del items[0]
        while items and right is not None and _is_anchor(items[-1], "AT_END", "AT_END_STRING"):
            right = ""
            del items[-1]
        if not items:
            return (left or "") + (right or "")
        last = len(items) - 1
        return "".join(
            self._item(item, flags, left if index == 0 else None, right if index == last else None)
            for index, item in enumerate(items)
        )

    def _item(self, item: tuple[Any, Any], flags: int, left: str | None, right: str | None) -> str:
        operation, argument = str(item[0]), item[1]
        if operation == "SUBPATTERN":
            _, added, removed, inside = argument
            if (added | removed) & ~_KNOWN_FLAGS:
                raise UnsupportedRegex("flags other than s, x and a are not supported")
            return f"(?:{self.sequence(list(inside), (flags | added) & ~removed, left, right)})"
        if operation == "BRANCH":
            return "(?:" + "|".join(self.sequence(list(each), flags, left, right) for each in argument[1]) + ")"
        return (left or "") + self._inner(operation, argument, flags) + (right or "")

    def _inner(self, operation: str, argument: Any, flags: int) -> str:
        if operation == "LITERAL":
            return _character(argument)
        if operation == "NOT_LITERAL":
            return f"[^{_character(argument)}]"
        if operation == "ANY":
            return "(?s:.)" if flags & re.DOTALL else f"[^{self._dialect.line_ends}]"
        if operation == "IN":
            return self._class(argument, flags)
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):  # a lazy quantifier changes which match is found, not whether
            least, most, inside = argument
            bound = "" if most == _sre.MAXREPEAT else str(most)
            if least > MOST_REPETITIONS or (bound and most > MOST_REPETITIONS):
                raise UnsupportedRegex(f"a repetition of more than {MOST_REPETITIONS} is not supported")
            return f"(?:{self.sequence(list(inside), flags, None, None)}){{{least},{bound}}}"
        if operation == "AT":
            name = "a word boundary" if "BOUNDARY" in str(argument) else "an anchor inside the expression"
            raise UnsupportedRegex(f"{name} is not supported")
        raise UnsupportedRegex(f"{_REFUSED.get(operation, operation)} is not supported")

    def _class(self, members: Iterable[tuple[Any, Any]], flags: int) -> str:
        written, negated = [], False
        for operation, argument in members:
            if str(operation) == "NEGATE":
                negated = True
            elif str(operation) == "LITERAL":
                written.append(_character(argument))
            elif str(operation) == "RANGE":
                written.append(range_of(*argument))
            else:
                written.append(self._category(str(argument), flags))
        return f"[{'^' if negated else ''}{''.join(written)}]"

    def _category(self, name: str, flags: int) -> str:
        kind, negated = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[name.rpartition("_")[2]], "_NOT_" in name
        members = self._dialect.categories.get(kind) or _members(kind, bool(flags & re.ASCII))
        return f"[{'^' if negated else ''}{members}]"


@cache
def _members(kind: str, ascii_only: bool) -> str:
    """The members of a class of Python's, asked of Python: Rust's classes of the same name have others."""
    every = "".join(map(chr, (*range(_SURROGATES[0]), *range(_SURROGATES[1] + 1, _LAST + 1))))
    runs = re.finditer(rf"\{kind}+", every, re.ASCII if ascii_only else 0)
    return "".join(range_of(ord(run[0][0]), ord(run[0][-1])) for run in runs)


def range_of(first: int, last: int) -> str:
    """Members of a class: these code points and those between, but for surrogates, of which no text is made."""
    parts = [(first, min(last, _SURROGATES[0] - 1)), (max(first, _SURROGATES[1] + 1), last)]
    if all(low > high for low, high in parts):
        raise UnsupportedRegex("a range of surrogates is not supported")
    return "".join(f"{_character(low)}-{_character(high)}" for low, high in parts if low <= high)


def _character(code: int) -> str:
    if _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise UnsupportedRegex("a lone surrogate is not supported")
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _is_anchor(item: tuple[Any, Any], *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names


_ECMA.categories["s"] = "".join(
    range_of(ord(part[0]), ord(part[-1])) for part in re.findall(r".-.|.", _ECMA_SPACE, re.DOTALL)
)
