"""Typed reading of the JSON objects in a checkpoint: every mistake names the file, the key and the value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.errors import UserError


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
    def from_file(cls, path: Path) -> JsonObject:
        """Read a whole file.

        Raises:
            UserError: the file is missing, is not JSON, or is not an object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: is not JSON ({error})") from None
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
        shown = f" is {json.dumps(self.values[key], default=str)}:" if key in self else ""
        return UserError(f"{self.path}: {self.key(key)}{shown} {problem}")

    def _required(self, key: str) -> object:
        if key not in self:
            raise self.error(key, "is required")
        return self.values[key]

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "must be an integer")
        if value < minimum:
            raise self.error(key, f"must be at least {minimum}")
        return value

    def positive(self, key: str) -> float:
        """A finite number above zero."""
        value = self._required(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(key, "must be a number")
        if not 0 < value < float("inf"):
            raise self.error(key, "must be positive and finite")
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

    def integers(self, key: str, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers, each at least `minimum`."""
        value = self._required(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= minimum for item in value):
            raise self.error(key, f"must be a list of integers, each at least {minimum}")
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
