"""Regular expressions rewritten for the grammar engine, which knows neither anchors nor Python's or ECMA's classes.

Python's own parser reads them. What is written has the same language, in a subset of the syntax of Rust's regex crate
that needs no escaping anywhere: letters, digits and structure as they are, everything else as `\\x{...}`.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_sre: Any = importlib.import_module("re._constants" if sys.version_info >= (3, 11) else "sre_constants")
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

Range = tuple[int, int]
"""Code points, both ends included."""

MOST_REPETITIONS = 100_000
"""Of one part of an expression; the engine counts in 32 bits and gets slow long before."""

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_ANYTHING = "(?s:.*)"
_NOTHING = r"[^\x{0}-\x{10FFFF}]"
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
    categories: Mapping[str, Sequence[Range]]
    """Members of the classes `d`, `w` and `s`; without, Python's own for texts."""


_ECMA = _Dialect(
    "\n\r\u2028\u2029",
    {
        "d": [(ord("0"), ord("9"))],
        "w": [(ord("0"), ord("9")), (ord("A"), ord("Z")), (ord("_"), ord("_")), (ord("a"), ord("z"))],
        "s": [(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
        + [(code, code) for code in (0x202F, 0x205F, 0x3000, 0xFEFF)],
    },
)
_PYTHON = _Dialect("\n", {})


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
            return class_of([(argument, argument)], negated=True)
        if operation == "ANY":
            return class_of(
                ((ord(end), ord(end)) for end in self._dialect.line_ends if not flags & re.DOTALL), negated=True
            )
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
        ranges: list[Range] = []
        negated = False
        for operation, argument in members:
            if str(operation) == "NEGATE":
                negated = True
            elif str(operation) == "LITERAL":
                ranges.append((argument, argument))
            elif str(operation) == "RANGE":
                ranges.append(argument)
            else:
                ranges += self._category(str(argument), flags)
        return class_of(ranges, negated=negated)

    def _category(self, name: str, flags: int) -> Sequence[Range]:
        kind = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[name.rpartition("_")[2]]
        members = self._dialect.categories.get(kind) or _members(kind, bool(flags & re.ASCII))
        return _complement(members) if "_NOT_" in name else members


@cache
def _members(kind: str, ascii_only: bool) -> tuple[Range, ...]:
    """The members of a class of Python's, asked of Python: Rust's classes of the same name have others."""
    every = "".join(map(chr, range(_LAST + 1)))
    return tuple(
        (ord(run[0][0]), ord(run[0][-1])) for run in re.finditer(rf"\{kind}+", every, re.ASCII if ascii_only else 0)
    )


def class_of(ranges: Iterable[Range], *, negated: bool = False) -> str:
    """A class of code points, or of all others; written without negation, which Rust gets wrong around surrogates."""
    merged = _merged(ranges)
    if negated:
        merged = _complement(merged)
    if not merged:
        return _NOTHING
    return "[" + "".join(f"{_character(first)}-{_character(last)}" for first, last in merged) + "]"


def _merged(ranges: Iterable[Range]) -> list[Range]:
    """In order and apart. Surrogates, of which no text is made, are in a range that has members on both sides."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        first = _SURROGATES[1] + 1 if _SURROGATES[0] <= first <= _SURROGATES[1] else first
        last = _SURROGATES[0] - 1 if _SURROGATES[0] <= last <= _SURROGATES[1] else last
        before = merged[-1][1] if merged else -2
        after = _SURROGATES[1] if before == _SURROGATES[0] - 1 else before
        if first > last:
            continue
        if first <= after + 1:
            merged[-1] = (merged[-1][0], max(before, last))
        else:
            merged.append((first, last))
    return merged


def _complement(ranges: Iterable[Range]) -> list[Range]:
    gaps, start = [], 0
    for first, last in _merged(ranges):
        gaps.append((start, first - 1))
        start = last + 1
    gaps.append((start, _LAST))
    return _merged(gap for gap in gaps if gap[0] <= gap[1])


def _character(code: int) -> str:
    if _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise UnsupportedRegex("a lone surrogate is not supported")
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


def _is_anchor(item: tuple[Any, Any], *names: str) -> bool:
    return str(item[0]) == "AT" and str(item[1]) in names
