"""Grammars in llama.cpp's EBNF, written as rules of the grammar engine's Lark.

The engine divides text into lexemes, each as long as it can be, before it looks at rules. The EBNF knows no lexemes: to
keep its meaning, every character becomes a lexeme of its own.
"""

from __future__ import annotations

import re

from dflash_trt.runtime.regular_expression import Range, UnsupportedRegex, class_of, literal

MOST_REPETITIONS = 10_000
"""Of one part; the engine makes rules for them."""

_TOKEN = re.compile(
    r"""(?:\s|\#[^\r\n]*)*(?:
    (?P<rule>[\w-]+)\s*::= | (?P<name>[\w-]+)
    | "(?P<literal>(?:[^"\\]|\\.)*)" | \[(?P<negated>\^?)(?P<members>(?:[^\]\\]|\\.)*)\]
    | \{\s*(?P<least>\d{1,9})\s*(?P<upto>,\s*(?P<most>\d{1,9})?\s*)?\}
    | (?P<sign>[|().*+?]) | (?P<end>\Z) )""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt\\\"\[\]^-]))|([^\\])", re.DOTALL
)
_MEMBER = re.compile(rf"({_CHARACTER.pattern})(?:-({_CHARACTER.pattern}))?", re.DOTALL)


class InvalidGrammar(ValueError):
    """The grammar is malformed; one line that says where."""


def lark_rules(grammar: str, prefix: str) -> tuple[str, str]:
    """Translate a grammar.

    Args:
        grammar: its root rule is `root`.
        prefix: what the names of its rules begin with in Lark, lower-case letters.

    Returns:
        The rules, a line each, and the name of the root.

    Raises:
        InvalidGrammar: it is malformed.
    """
    reader = _Reader(grammar, prefix)
    try:
        lines = reader.rules()
    except UnsupportedRegex as error:
        raise reader.error(str(error)) from None
    except RecursionError:
        raise InvalidGrammar("has too many groups in one another") from None
    absent = {"root": "", **reader.used}.keys() - reader.defined
    if absent:
        raise InvalidGrammar(f"has no rule {sorted(absent)[0]}")
    return "".join(lines), reader.name("root")


class _Reader:
    """Reads rules from left to right; a rule ends where the next one's name begins."""

    def __init__(self, grammar: str, prefix: str) -> None:
        self._grammar = grammar
        self._prefix = prefix
        self._at = 0
        self.used: dict[str, str] = {}
        self.defined: set[str] = set()
        self._token = self._next()

    def error(self, problem: str) -> InvalidGrammar:
        """A refusal that names the line."""
        line = self._grammar.count("\n", 0, self._at) + 1
        return InvalidGrammar(f"{problem}, in line {line}")

    def name(self, rule: str) -> str:
        """The rule's name in Lark."""
        return self.used.setdefault(rule, f"{self._prefix}{len(self.used)}")

    def rules(self) -> list[str]:
        """All rules, as lines."""
        lines = []
        while self._token["end"] is None:
            rule = self._token["rule"]
            if rule is None:
                raise self.error("needs a rule, name ::= ...")
            if rule in self.defined:
                raise self.error(f"has the rule {rule} twice")
            self.defined.add(rule)
            self._token = self._next()
            lines.append(f"{self.name(rule)}: {self._alternatives()}\n")
        return lines

    def _next(self) -> re.Match[str]:
        found = _TOKEN.match(self._grammar, self._at)
        if found is None:
            raise self.error("is malformed")
        self._at = found.end()
        return found

    def _alternatives(self) -> str:
        written = [self._sequence()]
        while self._token["sign"] == "|":
            self._token = self._next()
            written.append(self._sequence())
        return " | ".join(written)

    def _sequence(self) -> str:
        written: list[str] = []
        while True:
            token = self._token
            if token["rule"] is not None or token["end"] is not None or token["sign"] in ("|", ")"):
                return " ".join(written) or '""'
            if token["sign"] in ("*", "+", "?") or token["least"] is not None:
                if not written:
                    raise self.error("repeats nothing")
                written[-1] = f"({written[-1]}){token['sign'] or self._bounds(token)}"
                self._token = self._next()
            else:
                written.append(self._item(token))

    def _item(self, token: re.Match[str]) -> str:
        self._token = self._next()
        if token["name"] is not None:
            return self.name(token["name"])
        if token["literal"] is not None:
            characters = [f"/{literal(each)}/" for each in self._characters(token["literal"])]
            return f"({' '.join(characters)})" if characters else '""'
        if token["members"] is not None:
            return f"/{self._class(token['members'], token['negated'])}/"
        if token["sign"] == ".":
            return "/(?s:.)/"
        written = self._alternatives()
        if self._token["sign"] != ")":
            raise self.error("does not close a group")
        self._token = self._next()
        return f"({written})"

    def _bounds(self, token: re.Match[str]) -> str:
        least = int(token["least"])
        most = int(token["most"] or least)
        if most < least or most > MOST_REPETITIONS:
            raise self.error(f"repeats {least} to {most} times, of {MOST_REPETITIONS} that are possible")
        return f"{{{least},{'' if token['upto'] and not token['most'] else most}}}"

    def _characters(self, text: str) -> list[str]:
        found = list(_CHARACTER.finditer(text))
        if "".join(each[0] for each in found) != text:
            raise self.error("has an unknown escape")
        return [self._decoded(each.groups()) for each in found]

    def _class(self, members: str, negated: str) -> str:
        found = list(_MEMBER.finditer(members))
        if "".join(each[0] for each in found) != members:
            raise self.error("has an unknown escape")
        if not found:
            raise self.error("has an empty class")
        ranges: list[Range] = []
        for each in found:
            first = self._decoded(each.groups()[1:6])
            last = self._decoded(each.groups()[7:12]) if each[7] else first
            if first > last:
                raise self.error(f"has the range {each[0]}, which is empty")
            ranges.append((ord(first), ord(last)))
        return class_of(ranges, negated=bool(negated))

    def _decoded(self, groups: tuple[str | None, ...]) -> str:
        code = groups[0] or groups[1] or groups[2]
        if code is None:
            return groups[4] or {"n": "\n", "r": "\r", "t": "\t"}.get(groups[3] or "", groups[3] or "")
        if int(code, 16) > 0x10FFFF:
            raise self.error(f"has the character {code}, which is none")
        return chr(int(code, 16))
