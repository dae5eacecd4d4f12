"""Small JSON schemas and values, drawn so that keywords meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "ab", 'q"', "\n", "é"]
PATTERNS = ["a", "^a", "b$", "^a*$", "^[ab]+$", "^(a|bc)$", "^.{2}$", r"^\d+$", r"\s", "^$", "c|^a", "^[^a]*$"]
NUMBERS = [0, 1, 2, 3, -1, 5, 10, -7, 0.5, 1.5, -2.5, 0.1, 2.25, 12.75]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 1.5, 0.5, 10, -2.5, "", "a", "b", "ab", "abc", "é", "\U0001f600", "1", " "),
    *("a\nb", [], [1], [1, 2], [1, 1], ["a"], [1, "a"], [[]], {}, {"a": 1}, {"b": "a"}, {"a": 1, "b": 2}, {"ab": 1}),
    *({"a": "x", "c": [1]}, {"é": 1, "a": {}}, {"a": 1, "b": 2, "ab": 3}, {'q"': 1, "\n": 2}),
]

_COUNTS = st.integers(0, 3)
_TYPES = st.sampled_from(
    ["integer", "number", "string", "array", "object", "null", ["string", "null"], ["integer", "object"]]
)


def _some(kind: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=kind)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    numbers, names = st.sampled_from(NUMBERS), st.sampled_from(NAMES)
    bounds = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers)
    schemas = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        _some({**bounds, "multipleOf": numbers.filter(lambda number: number > 0)}),
        _some({"minLength": _COUNTS, "maxLength": _COUNTS, "pattern": st.sampled_from(PATTERNS)}),
        _some({"items": inner, "prefixItems": schemas, "minItems": _COUNTS, "maxItems": _COUNTS}),
        _some({"unevaluatedItems": inner, "uniqueItems": st.booleans(), "contains": inner}),
        _some(
            {
                "properties": st.dictionaries(names, inner, max_size=3),
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(PATTERNS), inner, max_size=2),
                "minProperties": _COUNTS,
                "maxProperties": _COUNTS,
            }
        ),
        _some(
            {
                "properties": st.dictionaries(names, inner, max_size=2),
                "propertyNames": st.sampled_from(
                    [{"enum": ["a", "é"]}, {"pattern": "^a"}, {"const": "a"}, True, {"maxLength": 1}]
                ),
                "dependentRequired": st.dictionaries(names, st.lists(names, max_size=2, unique=True), max_size=1),
                "dependentSchemas": st.dictionaries(names, inner, max_size=1),
                "unevaluatedProperties": inner,
            }
        ),
        _some({"allOf": schemas, "anyOf": schemas, "oneOf": schemas, "not": inner}),
        _some({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=6), "const": st.sampled_from(VALUES)}),
        _some({"$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#", "#anchor"])}),
    )


def _merged(parts: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


_INNER = st.recursive(
    st.booleans() | st.sampled_from([{}, {"type": "integer"}, {"type": "string"}, {"const": 1}]),
    lambda inner: st.tuples(_some({"type": _TYPES}), _keywords(inner), _keywords(inner)).map(_merged),
    max_leaves=6,
)
SCHEMAS = st.tuples(
    st.tuples(_some({"type": _TYPES}), _keywords(_INNER), _keywords(_INNER)).map(_merged), _INNER, _INNER
).map(lambda drawn: {**drawn[0], "$defs": {"x": drawn[1], "y": drawn[2], "z": {"$anchor": "anchor", "type": "object"}}})


def orders(value: Any) -> Iterator[Any]:
    """The value with its properties in other orders, not all where they are many."""
    if isinstance(value, dict) and value:
        for order in itertools.permutations(value):
            for values in itertools.islice(itertools.product(*(list(orders(value[key])) for key in order)), 6):
                yield dict(zip(order, values, strict=True))
    elif isinstance(value, list) and value:
        for values in itertools.islice(itertools.product(*(list(orders(each)) for each in value)), 6):
            yield list(values)
    else:
        yield value
