"""Bodies that a schema of our OpenAPI document does not allow, and the field at fault in each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from hypothesis import strategies as st

MISSING = object()
"""In place of a value: leaves its field out."""

Put = Callable[[Any], Any]


@dataclass(frozen=True)
class Place:
    """Somewhere in a body.

    `put` makes the smallest body that is right but for the value that it is given, which comes to this place.
    """

    path: tuple[str | int, ...]
    put: Put

    @property
    def field(self) -> str:
        """The place as errors name it."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).removeprefix(".")


class Bodies:
    """Of one kind of request, by its schema in an OpenAPI document."""

    def __init__(self, document: dict[str, Any], name: str) -> None:
        self._schemas = document["components"]["schemas"]
        schema = {"$ref": f"#/components/schemas/{name}"}
        self._validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
        self.places = [place for place in self._places(schema) if place.path]
        assert self.is_right(self.least(schema))

    def is_right(self, body: Any) -> bool:
        """The schema allows it."""
        return bool(self._validator.is_valid(body))

    def wrong(self) -> st.SearchStrategy[tuple[Any, str]]:
        """A body with one mistake, and the field that it is in."""
        values = st.sampled_from(self.places).flatmap(lambda place: st.tuples(st.just(place), _values_at(place)))
        made = values.map(lambda each: (each[0].put(each[1]), each[0].field))
        return made.filter(lambda each: not self.is_right(each[0]))

    def least(self, schema: dict[str, Any]) -> Any:
        """The smallest value that a schema allows."""
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        if "anyOf" in schema:
            return self.least(schema["anyOf"][0])
        if schema.get("type") == "object":
            return {name: self.least(schema["properties"][name]) for name in schema.get("required", ())}
        if schema.get("type") == "array":
            return [self.least(schema["items"])]
        return {"string": "a", "integer": 1, "number": 1.0, "boolean": False}.get(schema.get("type", "any"))

    def _resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            return dict(self._schemas[schema["$ref"].rpartition("/")[2]])
        return schema

    def _places(self, schema: dict[str, Any]) -> Iterator[Place]:
        schema = self._resolved(schema)
        yield Place((), lambda value: value)
        for alternative in schema.get("anyOf", ()):
            yield from (place for place in self._places(alternative) if place.path)
        for place in self._places(schema["items"]) if schema.get("type") == "array" else ():
            yield Place((0, *place.path), _in_list(place.put))
        if schema.get("type") == "object":
            for name, inner in schema.get("properties", {}).items():
                for place in self._places(inner):
                    yield Place((name, *place.path), _in_object(self.least(schema), name, place.put))


def _in_list(put: Put) -> Put:
    return lambda value: [put(value)]


def _in_object(rest: dict[str, Any], name: str, put: Put) -> Put:
    def put_in(value: Any) -> Any:
        inside = put(value)
        return {key: each for key, each in rest.items() if key != name} | ({} if inside is MISSING else {name: inside})

    return put_in


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
_HUGE = st.sampled_from([2**31, -(2**31), 2**63, -(2**63) - 1, 2**64, 10**30, -(10**400), 1e308, -1e-308, 5e-324])
_DEEP = st.integers(3, 60).map(lambda depth: _nested(depth))
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), _HUGE, st.floats(allow_nan=False, allow_infinity=False), TEXTS
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
_VALUES = st.one_of(_SCALARS, JSON, _DEEP)


def _values_at(place: Place) -> st.SearchStrategy[Any]:
    return _VALUES if isinstance(place.path[-1], int) else _VALUES | st.just(MISSING)


def _nested(depth: int) -> Any:
    value: Any = depth
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value
