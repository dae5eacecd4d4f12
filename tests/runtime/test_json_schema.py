"""Schemas are enforced as a validator understands them, or refused by the place of what is not."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator, ReferencingError

from dflash_trt.runtime.json_schema import enforceable
from dflash_trt.runtime.lark import json_lark
from dflash_trt.runtime.unsupported_schema import UnsupportedSchema, shown
from tests.runtime.byte_engine import is_accepted, matcher_of, walked
from tests.runtime.schemas import SCHEMAS, VALUES, orders

UNSURE = re.compile(r"\d[eE]|\d{14}")
"""Numbers that a validator of float64 does not tell apart."""


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_may_be_written_is_what_a_validator_accepts(schema: dict[str, Any], seed: int) -> None:
    try:
        matcher = matcher_of(json_lark(schema))
    except UnsupportedSchema:
        return
    judge, draw = Draft202012Validator(schema), random.Random(seed)
    for text in (walked(matcher, draw) for _ in range(4)):
        if text is not None and not UNSURE.search(text):
            assert judge.is_valid(json.loads(text)), text
    for value in VALUES:
        texts = (json.dumps(each, ensure_ascii=False) for each in orders(value))
        assert any(is_accepted(matcher, text) for text in texts) == judge.is_valid(value), value


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "array", "minItems": 1}, ["[1]", "[ [], {} ]"], ["[]"]),
        ({"required": ["a"]}, ['{"a": 1}', '{"a":1,"b":2}', "5", "[]"], ["{}", '{"b":2}']),
        ({"allOf": [{"properties": {"a": {"minimum": 1}}}, {"required": ["a"]}]}, ['{"a":1}', "[]"], ["{}", '{"a":0}']),
        ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
        ({"enum": [1, "aa", "b", [1, 1]], "uniqueItems": True, "not": {"const": 1}}, ['"aa"', '"b"'], ["1", "[1,1]"]),
        ({"const": 1.0}, ["1"], ["2", "true", "1.5"]),
        ({"const": [True, {"a": None}]}, ['[true,{"a":null}]', '[ true, { "a": null } ]'], ['[1,{"a":null}]']),
        ({"type": "integer"}, ["1", "-7"], ["1.5", '"1"']),
        ({"multipleOf": 0.01, "minimum": 0}, ["1.25", "3", '"x"'], ["1.255", "-1"]),
        ({"maxLength": 1}, ['"\U0001f600"', '"\\n"', '""', "55"], ['"ab"', '"\n"', '"\\ud83d\\ude00"']),
        ({"pattern": "b"}, ['"abc"', '"b"'], ['"ac"']),
        ({"pattern": "^.$", "maxLength": 5}, ['"a"'], ['"\\n"', '"ab"']),
        ({"pattern": '^"\\\\$'}, ['"\\"\\\\"'], ['""']),
        ({"type": "string"}, ['"a\\"b\\\\"'], ['"\x01"', '"\t"', '"\x7f"', '"\\ud800"', '"\\x"', "'a'"]),
        ({"properties": {"a": {"const": 1}}}, ['{"a":1}', '{"b":2}'], ['{"a":2}', '{"\\u0061":2}', '{"b":2,"a":3}']),
        ({"uniqueItems": True, "type": "string"}, ['"a"'], ["[]"]),
        ({"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}, ['{"x1":null}', "{}"], ['{"a":1}']),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}}, ['{"a":1}'], ['{"c":1}', '{"a":2}']),
        ({"propertyNames": {"pattern": "^a"}}, ['{"ab":1}', "{}"], ['{"b":1}']),
        ({"dependentRequired": {"a": ["b"]}}, ['{"a":1,"b":2}', '{"b":2}', "{}"], ['{"a":1}']),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, ['{"a":1,"b":2}', '{"c":2}'], ['{"a":1}']),
        ({"unevaluatedProperties": False, "properties": {"a": {}}}, ['{"a":1}', "3"], ['{"b":1}']),
        ({"prefixItems": [{"const": 1}], "unevaluatedItems": False}, ["[1]", "[]"], ["[2]", "[1,1]"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["1.5"]),
        ({"$ref": "#/$defs/a%25", "maximum": 3, "$defs": {"a%": {"type": "integer"}}}, ["3"], ["4", '"a"']),
        ({"$ref": "#x", "$defs": {"~/": {"$anchor": "x", "const": 1}}}, ["1"], ["2"]),
        ({"$ref": "#/$defs/~0~1", "$defs": {"~/": {"const": 1}}}, ["1"], ["2"]),
        ({"$id": "http://x.y/z", "$ref": "http://x.y/z#/$defs/a", "$defs": {"a": {"const": 1}}}, ["1"], ["2"]),
        ({"properties": {"next": {"$ref": "#"}}, "type": "object"}, ['{"next":{"next":{}}}'], ['{"next":1}']),
        ({"format": "email", "x-any": {"uniqueItems": 1}, "default": 5, "x-guidance": {"lenient": True}}, ['"a"'], []),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {"const": 1}},
          "items": {"$ref": "#/definitions/a"}}, ["[1]"], ["[2]"]),
        (True, ["1", "{}"], ["x"]),
    ],
)  # fmt: skip
def test_corners(schema: bool | dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    matcher = matcher_of(json_lark(schema))
    for text in accepted + refused:
        assert is_accepted(matcher, text) == (text in accepted), text


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems: is not supported"),
        ({"anyOf": [{}, {"contains": {}}]}, ".anyOf[1].contains: is not supported"),
        ({"not": {}}, ".not: is not supported"),
        ({"items": {"if": {}, "then": {}}}, ".items.if: is not supported"),
        ({"$ref": "http://x.y/z"}, ".$ref: is 'http://x.y/z'; schemas outside"),
        ({"$ref": "other.json#/a"}, ".$ref: is 'other.json#/a'; schemas outside"),
        ({"$ref": "file:///etc/passwd", "enum": [1]}, ".enum: cannot be compared"),
        ({"$ref": "#/$defs/a"}, ".$ref: is '#/$defs/a', which leads to nothing"),
        ({"$ref": "#"}, ".$ref: is '#', which leads back"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, ".anyOf[1].$ref: is '#', which leads back"),
        ({"$dynamicRef": "#a"}, ".$dynamicRef: is not supported"),
        ({"properties": {"a": {"$id": "b"}}}, ".properties.a.$id: is not supported"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, ".$schema: is 'http://json-schema.org/draft-04"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/a", "type": "null"}, ".type: stands beside $ref"),
        ({"items": [{}]}, ".items: is no JSON schema"),
        ({"properties": {"a": {"type": "strin"}}}, ".properties.a.type: is no JSON schema"),
        ({"pattern": "(?=a)"}, ".pattern: is '(?=a)': a lookahead"),
        ({"patternProperties": {r"\bx": {}}}, r".patternProperties['\\bx']: is"),
        ({"patternProperties": {"a": {}, "b": {}}}, ": cannot be enforced (patternProperty"),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, ".items: oneOf is supported where"),
        ({"minProperties": 2}, ".minProperties: is 2; more than one above"),
        ({"propertyNames": {"maxLength": 3}}, ".propertyNames: is supported with"),
        ({"allOf": [{}], "unevaluatedProperties": False}, ".unevaluatedProperties: is not supported beside allOf"),
        ({"const": "a\u0000"}, ".const: has the character U+0000"),
        ({"enum": [2**60]}, ".enum: is 1152921504606846976; numbers"),
        ({"minimum": 1e300}, ".minimum: is 1e+300; numbers"),
        ({"exclusiveMinimum": 6, "maximum": 6.5}, ".exclusiveMinimum: is 6, which is not supported together with"),
        ({"multipleOf": 0.25, "minimum": 0}, ".multipleOf: is 0.25, which is not supported together with"),
        ({"allOf": [{"exclusiveMaximum": 3}, {"minimum": 2.5}]}, ".allOf[0].exclusiveMaximum: is 3, which"),
        ({"maxLength": 10**9}, ".maxLength: is 1000000000; more than 1000000"),
        ({"minItems": 10**9}, ".minItems: is 1000000000; more than 10000"),
        ({"properties": {"a b": {"required": ["c"], "properties": {"c": False}, "type": "object"}}, "required": ["a b"],
          "type": "object"}, ".properties['a b']: no value matches it"),
        (False, ": no value matches it"),
        ({"type": "null", "enum": [1]}, ": no value matches it"),
        ([], ": must be an object"),
    ],
)  # fmt: skip
def test_what_is_not_enforced_is_named(schema: Any, place: str) -> None:
    with pytest.raises(UnsupportedSchema) as refused:
        json_lark(schema)
    message = f"{shown(refused.value.path)}: {refused.value.problem}"
    assert message.startswith(place) and "\n" not in message


def test_definitions_one_behind_the_other_do_not_overflow() -> None:
    """The engine would follow them until its stack, and with it the process, ended."""
    chain = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
    with pytest.raises(UnsupportedSchema, match="more than 128 schemas deep"):
        json_lark({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {}}})


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a schema has made a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for schema in ({"$ref": "http://localhost:1/a"}, {"enum": [1], "items": {"$ref": "http://localhost:1/a"}}):
        with pytest.raises((UnsupportedSchema, ReferencingError)):
            json_lark(schema)


@given(schema=SCHEMAS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_is_rewritten_is_rewritten_to_itself(schema: dict[str, Any]) -> None:
    """The engine's keywords are a part of the standard's: a validator understands both schemas alike."""
    try:
        rewritten = enforceable(schema).schema
    except UnsupportedSchema:
        return
    before, after = Draft202012Validator(schema), Draft202012Validator(rewritten)
    for value in VALUES:
        assert before.is_valid(value) == after.is_valid(value), (value, rewritten)
