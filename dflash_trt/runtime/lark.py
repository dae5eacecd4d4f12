"""Structured outputs as grammars of the engine, llguidance's Lark, alone and put together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from llguidance import LLMatcher

from dflash_trt.runtime.gbnf import lark_rules
from dflash_trt.runtime.json_schema import EnforceableSchema, enforceable
from dflash_trt.runtime.regular_expression import literal, python_fullmatch
from dflash_trt.runtime.structured import MOST_WHITESPACE, InvalidForm, StructuredOutputs
from dflash_trt.runtime.unsupported_schema import UnsupportedSchema, shown

_MOST_TEXT = 2**17
"""Characters of a form."""
_MOST_NESTED = 64
"""Objects and lists of a schema that are in one another."""
_HEADER = '%llguidance {"no_forcing": true}\n'
"""Without it, where only one text can follow, only one of the ways to write it in tokens could."""
_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_WHITESPACE}}}",
    # Without \u every string has one spelling, so that a name which the schema lists cannot come in another.
    "json_allowed_escapes": 'nrbtf\\"',
}
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"')
_UNSATISFIABLE = "Unsatisfiable"
_WHERE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True)
class Lark:
    """A grammar: an expression, and the rules that it refers to."""

    expression: str
    rules: str = ""

    @property
    def text(self) -> str:
        """As the engine takes it."""
        return f"{_HEADER}start: {self.expression}\n{self.rules}"


def lark(form: StructuredOutputs) -> Lark:
    """What a form is in Lark.

    Raises:
        InvalidForm: the form is malformed or too large, or it has a part that cannot be enforced.
    """
    name, value = form.given
    try:
        _require_size(form)
        if form.regex is not None:
            return Lark(f"/{python_fullmatch(form.regex)}/")
        if form.choice is not None:
            return Lark("/" + "|".join(map(literal, form.choice)) + "/")
        if form.grammar is not None:
            rules, root = lark_rules(form.grammar, "g")
            return Lark(root, rules)
        schema = {"type": "object"} if form.json is None else form.json
        return json_lark(_parsed(schema) if isinstance(schema, str) else schema)
    except UnsupportedSchema as error:
        raise InvalidForm(f".json{shown(error.path)}", error.problem) from None
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidForm(f".{name}", f"{' '.join(str(error).split())}; the value is {shortened(value)}") from None


def json_lark(schema: bool | Mapping[str, Any]) -> Lark:
    """A JSON document that matches a schema.

    Raises:
        UnsupportedSchema: the schema has a part that cannot be enforced, or no document matches it.
    """
    made = enforceable(schema)
    written = _json_expression(made.schema)
    refused = LLMatcher.validate_grammar(written.text)
    if refused:
        raise _placed(refused, made)
    return written


def shortened(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _json_expression(schema: bool | Mapping[str, Any]) -> Lark:
    body = {"anyOf": [schema]} if isinstance(schema, bool) else schema
    return Lark(f"%json {json.dumps({**body, 'x-guidance': _OPTIONS})}")


def _placed(refused: str, made: EnforceableSchema) -> UnsupportedSchema:
    """The innermost schema that the engine refuses, for the reason that the whole is."""
    for path, part in made.parts:
        reason = LLMatcher.validate_grammar(_json_expression(part).text)
        if reason and (_UNSATISFIABLE in reason) == (_UNSATISFIABLE in refused):
            return UnsupportedSchema(path, _problem(reason))
    return UnsupportedSchema((), _problem(refused))


def _problem(reason: str) -> str:
    if "oneOf constraints" in reason:
        return "oneOf is supported where types, or a property's constants, tell its schemas apart; these may overlap"
    if _UNSATISFIABLE in reason:
        return f"no value matches it ({engine_problem(reason)})"
    return f"cannot be enforced ({engine_problem(reason)})"


def engine_problem(reason: str) -> str:
    """What the engine says, without where in the text of the grammar, and that text."""
    return _WHERE.sub("", reason.splitlines()[0])[:300]


def _parsed(text: str) -> Any:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, bool | dict):
        raise ValueError("must be a JSON schema, an object, true or false")
    return schema


def _require_size(form: StructuredOutputs) -> None:
    """Refuse what would take long to compile.

    Raises:
        ValueError: it would.
    """
    text = form.text
    text.encode()  # a lone surrogate has no bytes
    if len(text) > _MOST_TEXT:
        raise ValueError(f"has {len(text)} characters, it may have {_MOST_TEXT}")
    if form.json is not None:
        nested = list(accumulate((part in "[{") - (part in "]}") for part in _TEXT.sub("", text)))
        if max(nested, default=0) > _MOST_NESTED:
            raise ValueError(f"has {max(nested)} objects and lists in one another, it may have {_MOST_NESTED}")
