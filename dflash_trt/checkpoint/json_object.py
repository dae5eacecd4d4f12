"""Typed reading of the JSON objects in a checkpoint: every mistake names the file, the key and the value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from dflash_trt.checkpoint.regular_file import read_file
from dflash_trt.checkpoint.sizes import LARGEST_INTEGER, LARGEST_NUMBER, LARGEST_SIZES
from dflash_trt.errors import UserError

LARGEST_CONFIG = 16 << 20
"""Bytes of a config; the largest ones list the modules of a quantized model."""
_DEEPEST = 64
_LONGEST_SHOWN = 200


def read_json(path: Path, largest: int = LARGEST_CONFIG) -> object:
    """The value that a JSON file holds, nested no deeper than any walk over it can follow.

    Args:
        largest: bytes that the file may have.

    Raises:
        UserError: the file is missing or larger, is no regular file, is not JSON, or is nested deeper.
    """
    content = read_file(path, largest)
    try:
        value: object = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise _too_deep(path) from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({str(error).partition(';')[0]})") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for outer in level for item in _items(outer)]
    if level:
        raise _too_deep(path)
    return value


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep(path: Path) -> UserError:
    return UserError(f"{path}: is nested more than {_DEEPEST} levels deep")


class JsonObject:
    """One JSON object of a file. A key whose value is null counts as absent, as it does in transformers.

    Args:
        values: the parsed object.
        path: the file it came from; messages name it.
        name: dotted position inside that file, empty for the whole file.
    """

    def __init__(self, values: Mapping[str, object], path: Path, name: str = "") -> None:
        self.values = values
        self.path = path
        self.name = name

    @classmethod
    def from_file(cls, path: Path, largest: int = LARGEST_CONFIG) -> JsonObject:
        """Read a whole file.

        Raises:
            UserError: as `read_json`, or it is not an object.
        """
        values = read_json(path, largest)
        if not isinstance(values, dict):
            raise UserError(f"{path}: must hold a JSON object, not {type(values).__name__}")
        return cls(values, path)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def key(self, key: str) -> str:
        """The key as messages write it: dotted from the top of the file."""
        return f"{self.name}.{key}" if self.name else key

    def error(self, key: str, problem: str) -> UserError:
        """A refusal that names file, key and, where it has one, the value."""
        shown = json.dumps(self.values.get(key), default=str)
        if len(shown) > _LONGEST_SHOWN:
            shown = f"{shown[:_LONGEST_SHOWN]}..."
        return UserError(f"{self.path}: {self.key(key)}{f' is {shown}:' if key in self else ''} {problem}")

    def _required(self, key: str) -> object:
        if key not in self:
            raise self.error(key, "is required")
        return self.values[key]

    def _integer(self, key: str) -> int:
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "must be an integer")
        return value

    def integer(self, key: str, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
        value = self._integer(key)
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}")
        if value > maximum:
            raise self.error(key, f"must be at most {maximum}")
        return value

    def size(self, key: str, minimum: int = 1) -> int:
        """An integer, at most what `LARGEST_SIZES` has under the key."""
        return self.integer(key, minimum, LARGEST_SIZES[key])

    def token_id(self, key: str, vocab_size: int) -> int:
        """The id of a token in a vocabulary of `vocab_size`."""
        value = self._integer(key)
        if value < 0:
            raise self.error(key, "must be at least 0")
        if value >= vocab_size:
            raise self.error(key, f"must be below vocab_size, {vocab_size}")
        return value

    def positive(self, key: str, largest: float = LARGEST_NUMBER) -> float:
        """A number above zero, at most `largest`."""
        value = self._required(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, "must be a number")
        if not 0 < value < float("inf"):
            raise self.error(key, "must be positive and finite")
        if value > largest:
            raise self.error(key, f"must be at most {largest:g}")
        return float(value)

    def boolean(self, key: str, absent: bool) -> bool:
        """True or false; `absent` is what the format's own definition says a missing key means."""
        if key not in self:
            return absent
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, "must be a string")
        return value

    def integers(self, key: str, minimum: int = 0, maximum: int = LARGEST_INTEGER) -> tuple[int, ...]:
        """A list of integers, each from `minimum` to `maximum`."""
        value = self._required(key)
        if not isinstance(value, list) or not all(type(item) is int and minimum <= item <= maximum for item in value):
            raise self.error(key, f"must be a list of integers, each at least {minimum} and at most {maximum}")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._required(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def object(self, key: str) -> JsonObject:
        value = self._required(key)
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return JsonObject(value, self.path, self.key(key))
