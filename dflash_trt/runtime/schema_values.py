"""Numbers and constants of JSON schemas: which of them the grammar engine writes and compares exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dflash_trt.runtime.unsupported_schema import Path, UnsupportedSchema

_MOST = 2**53
_MOST_TOGETHER = 500
"""Different bounds, where any two may hold for one value."""
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


def require_exact(value: float, path: Path) -> float:
    """A number as the engine, which computes in float64 and writes no exponents, compares it exactly.

    Raises:
        UnsupportedSchema: it does not.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _MOST:
        return int(value)
    if abs(value) >= _MOST or "e" in repr(value):
        raise UnsupportedSchema(path, f"is {_short(value)}; numbers from 2^53 on, and below 0.0001, are not supported")
    return value


@dataclass(frozen=True)
class Bound:
    """A number of a schema, and where it stands."""

    path: Path
    value: float

    @property
    def keyword(self) -> str:
        """That it is the value of."""
        return str(self.path[-1])


def require_compatible(numbers: Sequence[Bound], *, combined: bool) -> None:
    """See that no two keywords meet in one value whose meanings the engine does not keep together.

    It takes an integer for allowed that is an exclusive bound, where the opposite bound is less than 1 away. It writes
    multiples of a fraction with a number of decimals that a range may leave out.

    Args:
        numbers: all bounds and `multipleOf` of a schema.
        combined: those of different schemas may hold for one value.

    Raises:
        UnsupportedSchema: two do.
    """
    groups: dict[Path, dict[tuple[str, float], Bound]] = {}
    for number in numbers:
        group = groups.setdefault(() if combined else number.path[:-1], {})
        group[number.keyword, number.value] = number
        if len(group) > _MOST_TOGETHER:
            raise UnsupportedSchema(number.path, f"is one of more than {_MOST_TOGETHER} numbers that may meet")
    for group in groups.values():
        for one, other in product(group.values(), repeat=2):
            if _is_too_near(one, other) or _needs_decimals(one, other):
                raise UnsupportedSchema(
                    one.path, f"is {one.value}, which is not supported together with {other.keyword} {other.value}"
                )


def _is_too_near(exclusive: Bound, other: Bound) -> bool:
    opposite = {"exclusiveMinimum": "aximum", "exclusiveMaximum": "inimum"}.get(exclusive.keyword)
    if opposite is None or not other.keyword.endswith(opposite):
        return False
    return exclusive.value == int(exclusive.value) and 0 < abs(other.value - exclusive.value) < 1


def _needs_decimals(multiple: Bound, other: Bound) -> bool:
    if multiple.keyword != "multipleOf" or isinstance(multiple.value, int) or other.value == multiple.value:
        return False
    digits = repr(multiple.value).partition(".")[2]
    even = len(digits) == 1 or (multiple.value < 1 and digits.strip("0") == "1")
    return not even or isinstance(other.value, float)


def require_writable(value: Any, path: Path) -> Any:
    """A constant as the engine writes it.

    Raises:
        UnsupportedSchema: a number in it is not exact, or a string in it holds a control character.
    """
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return require_exact(value, path)
    if isinstance(value, str):
        found = _UNWRITABLE.search(value)
        if found:
            raise UnsupportedSchema(path, f"has the character U+{ord(found[0]):04X}, which is not supported")
        return value
    if isinstance(value, list):
        return [require_writable(each, path) for each in value]
    return {require_writable(name, path): require_writable(each, path) for name, each in value.items()}


def of_types(values: Sequence[Any], types: str | Sequence[str]) -> list[Any]:
    """Those of the values that `type` allows."""
    allowed = {types} if isinstance(types, str) else set(types)
    return [value for value in values if _types(value) & allowed]


def _types(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


def _short(value: float) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
