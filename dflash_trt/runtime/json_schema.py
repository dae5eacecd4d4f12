"""JSON schemas rewritten in the keywords that the grammar engine enforces exactly, the rest refused by its place.

The engine orders properties as the schema does, writes strings without needless escapes and numbers without exponents
where they are bounded: for each document that a schema allows, one spelling can be written at least, and no spelling of
another can. Two kinds of document are left out on purpose: strings that hold a control character other than \\b, \\t,
\\n, \\f and \\r, and names that occur twice where the schema lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jsonschema_rs import ValidationError, meta

from dflash_trt.runtime.regular_expression import UnsupportedRegex, ecma_search
from dflash_trt.runtime.schema_keywords import APPLICATORS, DRAFTS, ENFORCED, TYPES, UNSUPPORTED
from dflash_trt.runtime.schema_references import References
from dflash_trt.runtime.schema_values import Bound, of_types, require_compatible, require_exact, require_writable
from dflash_trt.runtime.unsupported_schema import Path, UnsupportedSchema

MOST_DEEP = 128
"""Schemas in one another, references followed: the engine walks them on its stack, and ends the process at some 800."""
MOST_LENGTH = 1_000_000
MOST_ITEMS = 10_000
"""Bounds of lengths and of counts; the engine makes a rule for each item that is counted."""

Schema = bool | dict[str, Any]


@dataclass(frozen=True)
class EnforceableSchema:
    """A schema in the engine's keywords."""

    schema: Schema
    """With its definitions, where it has any."""
    parts: list[tuple[Path, dict[str, Any]]]
    """Its schemas, inner ones first, each as the engine could compile it alone, and where it comes from."""


def enforceable(schema: bool | Mapping[str, Any]) -> EnforceableSchema:
    """Rewrite a schema.

    Raises:
        UnsupportedSchema: it is malformed, or has a part that cannot be enforced.
    """
    if isinstance(schema, bool):
        return EnforceableSchema(schema, [])
    if not isinstance(schema, Mapping):
        raise UnsupportedSchema((), "must be an object, true or false")
    draft = _draft(schema)
    _require_well_formed(schema, ())
    rewriting = _Rewriting(References(schema), draft)
    root = rewriting.schema(schema, (), _Way())
    require_compatible(rewriting.numbers, combined=rewriting.combines)
    definitions = {"$defs": rewriting.definitions} if rewriting.definitions else {}
    parts = [(path, {**part, **definitions}) for path, part in rewriting.parts]
    return EnforceableSchema(root if isinstance(root, bool) else {**root, **definitions}, parts)


def _draft(schema: Mapping[str, Any]) -> int:
    name = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    if not isinstance(name, str) or name.removesuffix("#") not in DRAFTS:
        raise UnsupportedSchema(("$schema",), f"is {name!r}, it must be one of {', '.join(DRAFTS)}")
    return DRAFTS[name.removesuffix("#")]


def _require_well_formed(schema: Any, path: Path) -> None:
    try:
        meta.validate({key: value for key, value in schema.items() if key != "$schema"})
    except ValidationError as error:
        problem = " ".join(error.message.split())
        raise UnsupportedSchema((*path, *error.instance_path), f"is no JSON schema: {problem[:200]}") from None


@dataclass(frozen=True)
class _Way:
    """How one comes to a schema: through how many others, and which definition (or the root) it applies in place of."""

    depth: int = 0
    owner: str | None = "root"

    def beside(self) -> _Way:
        """To a schema that applies to the same value."""
        return _Way(self.depth + 1, self.owner)

    def inside(self) -> _Way:
        """To a schema of a property or an item."""
        return _Way(self.depth + 1, None)


@dataclass
class _Rewriting:
    """Goes over one schema once, each of its definitions when it is first referred to."""

    references: References
    draft: int
    definitions: dict[str, Schema] = field(default_factory=dict)
    parts: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    _names: dict[Path, str] = field(default_factory=dict)
    _followed: dict[str, set[str]] = field(default_factory=dict)
    """Of each definition, those that it refers to for the value itself."""
    numbers: list[Bound] = field(default_factory=list)
    combines: bool = False
    """Numbers of different schemas may hold for one value."""

    def schema(self, schema: Any, path: Path, way: _Way) -> Schema:
        """One schema, everything in it included."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UnsupportedSchema(path, "must be a JSON schema, an object, true or false")
        if way.depth > MOST_DEEP:
            raise UnsupportedSchema(path, f"is more than {MOST_DEEP} schemas deep, references followed")
        if path and isinstance(schema.get("$id"), str):
            raise UnsupportedSchema((*path, "$id"), "is not supported below the root")
        known = {key: value for key, value in schema.items() if key in ENFORCED or key in UNSUPPORTED}
        if self.draft < 2019 and "$ref" in known and len(known) > 1:
            hidden = next(key for key in known if key != "$ref")
            raise UnsupportedSchema((*path, hidden), f"stands beside $ref, which hides it in draft {self.draft}")
        if "enum" in known or "const" in known:
            rewritten = self._values(known, path)
        else:
            known = {key: value for key, value in known.items() if not self._says_nothing(key, known)}
            for key in UNSUPPORTED:
                if key in known:
                    raise UnsupportedSchema((*path, key), "is not supported")
            rewritten = self._keywords(known, path, way)
        if isinstance(rewritten, dict):
            self.parts.append((path, rewritten))
        return rewritten

    def _says_nothing(self, key: str, schema: Mapping[str, Any]) -> bool:
        """The keyword concerns values that `type` excludes, or allows whatever there is."""
        given = schema.get("type", TYPES)
        types = {given} if isinstance(given, str) else set(given)
        if UNSUPPORTED.get(key) is not None and UNSUPPORTED[key] not in types:
            return True
        return (key, schema[key]) in (("uniqueItems", False), ("dependencies", {}), ("not", False))

    def _values(self, known: Mapping[str, Any], path: Path) -> Schema:
        """`enum` and `const`: of their values, those that everything beside them allows."""
        keyword = "const" if "const" in known else "enum"
        values = [known["const"]] if keyword == "const" else list(known["enum"])
        beside = known.keys() - {keyword, "type"}
        for key in ("dependencies", "$recursiveRef"):
            if key in beside:
                raise UnsupportedSchema((*path, key), "is not supported")
        if beside:
            values = self.references.accepted(values, path, (*path, keyword))
        elif "type" in known:
            values = of_types(values, known["type"])
        written = [require_writable(value, (*path, keyword)) for value in values]
        return {"enum": written} if written else False

    def _keywords(self, schema: Mapping[str, Any], path: Path, way: _Way) -> Schema:
        """A schema without `enum` and `const`. Applicators come last, so that the engine sees the rest whole."""
        simple = {
            key: write(self, schema[key], (*path, key), way.inside()) for key, write in _SIMPLE.items() if key in schema
        }
        self._require_counts(schema, path)
        self._write_unevaluated(schema, simple, path, way.inside())
        if "propertyNames" in schema:
            self._write_names(schema, simple, path, way.inside())
        self.combines |= not schema.keys().isdisjoint(_COMBINING)
        every = self._dependent(schema, path, way.beside())
        for key in ("allOf", "anyOf", "oneOf"):
            if key in schema:
                options = [self.schema(each, (*path, key, at), way.beside()) for at, each in enumerate(schema[key])]
                if key == "allOf":
                    every += options
                else:
                    simple[key] = options
        if every:
            simple["allOf"] = every
        if "$ref" in schema:
            simple["$ref"] = self._reference(schema["$ref"], (*path, "$ref"), way)
        return simple

    def _reference(self, reference: str, at: Path, way: _Way) -> str:
        path, found = self.references.target(reference, at)
        if path not in self._names:
            self._names[path] = str(len(self._names))
            if not isinstance(found, bool | Mapping):
                raise UnsupportedSchema(at, f"is {reference!r}, which leads to no schema")
            if isinstance(found, Mapping):
                _require_well_formed(found, path)
            self.definitions[self._names[path]] = self.schema(found, path, _Way(way.depth + 1, self._names[path]))
        name = self._names[path]
        if way.owner is not None:
            self._followed.setdefault(way.owner, set()).add(name)
            if self._leads_to(name, way.owner):
                raise UnsupportedSchema(at, f"is {reference!r}, which leads back to where it stands")
        return f"#/$defs/{name}"

    def _leads_to(self, start: str, end: str) -> bool:
        seen: set[str] = set()
        left = [start]
        while left:
            name = left.pop()
            if name == end:
                return True
            if name not in seen:
                seen.add(name)
                left += self._followed.get(name, ())
        return False

    def _require_counts(self, schema: Mapping[str, Any], path: Path) -> None:
        """The engine counts names that the schema does not list, and one of them may come twice."""
        least, required = schema.get("minProperties", 0), len(set(schema.get("required", ())))
        if least > required + 1:
            raise UnsupportedSchema(
                (*path, "minProperties"), f"is {least}; more than one above the {required} of required is not supported"
            )

    def _write_unevaluated(self, schema: Mapping[str, Any], simple: dict[str, Any], path: Path, way: _Way) -> None:
        """Where nothing else evaluates, what is not evaluated is what is additional."""
        for key, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in schema and plain not in schema and schema[key] is not True:
                other = next((each for each in schema if each in APPLICATORS), None)
                if other is not None:
                    raise UnsupportedSchema((*path, key), f"is not supported beside {other}")
                simple[plain] = self.schema(schema[key], (*path, key), way)

    def _write_names(self, schema: Mapping[str, Any], simple: dict[str, Any], path: Path, way: _Way) -> None:
        """`propertyNames`, where it lists the names or is a pattern that all of them have."""
        at, names, rest = (*path, "propertyNames"), schema["propertyNames"], simple.get("additionalProperties", True)
        written = self.schema(names, at, way)
        listed = simple.get("properties", {})
        if written is True or written == {} or written == {"type": "string"}:
            return
        keys = set() if isinstance(written, bool) else written.keys() - {"type"}
        if isinstance(written, bool) or keys == {"enum"}:
            allowed = [name for name in (written["enum"] if written else ()) if isinstance(name, str)]
            if "patternProperties" in simple:
                raise UnsupportedSchema(at, "is not supported beside patternProperties")
            known = {name: value if name in allowed else False for name, value in listed.items()}
            simple["properties"] = {**known, **{name: rest for name in allowed if name not in listed}}
        elif keys == {"pattern"} and not listed and "patternProperties" not in simple:
            simple["patternProperties"] = {written["pattern"]: rest}
        else:
            raise UnsupportedSchema(at, "is supported with enum or const, or with a pattern where no names are listed")
        simple["additionalProperties"] = False

    def _dependent(self, schema: Mapping[str, Any], path: Path, way: _Way) -> list[Schema]:
        """Either the name is not there, or what depends on it holds."""
        every: list[Schema] = []
        for name, needed in schema.get("dependentRequired", {}).items():
            every.append({"anyOf": [{"properties": {name: False}}, {"required": list(dict.fromkeys((name, *needed)))}]})
        for name, needed in schema.get("dependentSchemas", {}).items():
            written = self.schema(needed, (*path, "dependentSchemas", name), way)
            every.append({"anyOf": [{"properties": {name: False}}, {"required": [name], "allOf": [written]}]})
        return every

    def _named(self, schemas: Mapping[str, Any], path: Path, way: _Way) -> dict[str, Schema]:
        return {name: self.schema(each, (*path, name), way) for name, each in schemas.items()}

    def _patterns(self, schemas: Mapping[str, Any], path: Path, way: _Way) -> dict[str, Schema]:
        written = self._named(schemas, path, way)
        patterns = {self._pattern(name, (*path, name), way): each for name, each in written.items()}
        if len(patterns) < len(written):
            raise UnsupportedSchema(path, "has two patterns of the same meaning")
        return patterns

    def _list(self, schemas: list[Any], path: Path, way: _Way) -> list[Schema]:
        return [self.schema(each, (*path, index), way) for index, each in enumerate(schemas)]

    def _pattern(self, pattern: str, path: Path, _: _Way) -> str:
        try:
            return f"^(?:{ecma_search(pattern)})$"
        except UnsupportedRegex as error:
            raise UnsupportedSchema(path, f"is {pattern[:100]!r}: {error}") from None

    def _same(self, value: Any, _: Path, __: _Way) -> Any:
        return value

    def _number(self, value: float, path: Path, _: _Way) -> float:
        exact = require_exact(value, path)
        self.numbers.append(Bound(path, exact))
        return exact

    def _length(self, value: float, path: Path, _: _Way) -> int:
        return _bounded(value, MOST_LENGTH, path)

    def _count(self, value: float, path: Path, _: _Way) -> int:
        return _bounded(value, MOST_ITEMS, path)


def _bounded(value: float, most: int, path: Path) -> int:
    if value > most:
        raise UnsupportedSchema(path, f"is {value}; more than {most} is not supported")
    return int(value)


_COMBINING = {*APPLICATORS, "patternProperties"}

_SIMPLE: dict[str, Callable[[_Rewriting, Any, Path, _Way], Any]] = {
    "type": _Rewriting._same,
    "properties": _Rewriting._named,
    "patternProperties": _Rewriting._patterns,
    "additionalProperties": _Rewriting.schema,
    "required": _Rewriting._same,
    "minProperties": _Rewriting._count,
    "maxProperties": _Rewriting._count,
    "prefixItems": _Rewriting._list,
    "items": _Rewriting.schema,
    "minItems": _Rewriting._count,
    "maxItems": _Rewriting._count,
    "minLength": _Rewriting._length,
    "maxLength": _Rewriting._length,
    "pattern": _Rewriting._pattern,
    "minimum": _Rewriting._number,
    "maximum": _Rewriting._number,
    "exclusiveMinimum": _Rewriting._number,
    "exclusiveMaximum": _Rewriting._number,
    "multipleOf": _Rewriting._number,
}
