"""How JSON is read, and how its mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.errors import UserError

PATH = Path("config.json")


def test_null_is_absent() -> None:
    values = JsonObject({"a": None}, PATH)
    assert "a" not in values
    assert values.boolean("a", absent=True)
    with pytest.raises(UserError, match=r"^config\.json: a is required$"):
        values.integer("a")


def test_a_nested_key_is_named_from_the_top() -> None:
    inner = JsonObject({"a": {"b": {"c": "x\ny"}}}, PATH).object("a").object("b")
    assert inner.key("c") == "a.b.c"
    with pytest.raises(UserError, match=r'^config\.json: a\.b\.c is "x\\ny": must be an integer$'):
        inner.integer("c")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1.5])
def test_positive_numbers_are_finite(value: float) -> None:
    with pytest.raises(UserError, match="must be positive and finite"):
        JsonObject({"a": value}, PATH).positive("a")


@pytest.mark.parametrize("value", [[True], [1.0], [-1], "12", 1])
def test_lists_of_integers(value: object) -> None:
    assert JsonObject({"a": [0, 3]}, PATH).integers("a") == (0, 3)
    with pytest.raises(UserError, match="must be a list of integers"):
        JsonObject({"a": value}, PATH).integers("a")
