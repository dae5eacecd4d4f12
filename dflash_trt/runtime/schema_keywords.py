"""The keywords of JSON schemas (draft 2020-12), and what becomes of each: a table of what is enforced."""

from __future__ import annotations

TYPES = ("null", "boolean", "number", "string", "array", "object")

ENFORCED = frozenset(
    (
        "type",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "prefixItems",
        "items",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "unevaluatedProperties",
        "unevaluatedItems",
    )
)
"""Exactly, or refused where they stand together with what makes that impossible."""

UNSUPPORTED = {
    "not": None,
    "if": None,
    "$dynamicRef": None,
    "$recursiveRef": None,
    "uniqueItems": "array",
    "contains": "array",
    "dependencies": "object",
}
"""Refused, and the type of values that each concerns: beside a `type` that excludes it, it says nothing."""

APPLICATORS = frozenset(["$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"])
"""Whose schemas may evaluate a property or an item, so that `unevaluated...` does not see it."""

SCHEMA = frozenset(
    (
        "not",
        "if",
        "then",
        "else",
        "contains",
        "items",
        "additionalItems",
        "additionalProperties",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contentSchema",
    )
)
SCHEMAS = frozenset(["allOf", "anyOf", "oneOf", "prefixItems"])
NAMED_SCHEMAS = frozenset(["$defs", "definitions", "properties", "patternProperties", "dependentSchemas"])
"""Keywords whose values are a schema, a list of schemas, and an object of schemas."""

DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema": 2020,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/draft-06/schema": 6,
}
"""What `$schema` may be, without an empty fragment. In drafts before 2019, `$ref` hides what stands beside it."""
