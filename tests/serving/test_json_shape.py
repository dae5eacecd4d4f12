"""The shape of a text, against that of the value that the standard library reads from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.serving.json_shape import JsonShape, json_shape
from tests.serving.malformed_bodies import JSON

TRICKY = st.recursive(
    st.text('"\\[]{},:aé\n', max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\[]{},', max_size=3), inner, max_size=4),
)


def shape_of(value: Any) -> JsonShape:
    """An empty list or object counts as if it had a value, so that none has to be looked into."""
    if not isinstance(value, list | dict):
        return JsonShape(1, 0)
    inner = [shape_of(each) for each in (value.values() if isinstance(value, dict) else value)]
    return JsonShape(1 + sum(each.values for each in inner) + (not inner), 1 + max((e.depth for e in inner), default=0))


@given(JSON | TRICKY, st.booleans(), st.sampled_from([None, 1]))
def test_it_is_that_of_the_value(value: Any, ensure_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode("utf-8", "surrogatepass")
    assert json_shape(text) == shape_of(json.loads(text))


@given(st.binary(max_size=40) | st.text('"\\[]{},', max_size=40).map(str.encode))
def test_any_bytes_have_one(text: bytes) -> None:
    shape = json_shape(text)
    assert 1 <= shape.values <= len(text) + 1 and 0 <= shape.depth <= len(text)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"[" * 1000, JsonShape(1001, 1000)),
        (b"[[]" * 1000, JsonShape(2001, 1001)),
        (b'"' + b"[" * 1000, JsonShape(1, 0)),
        (b'"' + b"\\" * 1001 + b'"' + b"[" * 10, JsonShape(1, 0)),
        (b'"' + b"\\" * 1000 + b'"' + b"[" * 10, JsonShape(11, 10)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_no_parser_would_finish(text: bytes, shape: JsonShape) -> None:
    assert json_shape(text) == shape
