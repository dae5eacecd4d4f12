"""Numbers and constants of JSON schemas: which of them the grammar engine writes and compares exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from dflash_trt.runtime.unsupported_schema import Path, UnsupportedSchema

_MOST = 2**53
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")


def require_exact(value: float, path: Path) -> float:
    """A number as the engine, which computes in float64 and writes no exponents, compares it exactly.

    Raises:
        UnsupportedSchema: it does not.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MOST:
        return int(value)
    if abs(value) > _MOST or "e" in repr(value):
        raise UnsupportedSchema(path, f"is {_short(value)}; numbers beyond 2^53, or below 0.0001, are not supported")
    return value


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
