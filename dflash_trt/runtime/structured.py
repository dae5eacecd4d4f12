"""What form a structured output must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import UserError

MOST_WHITESPACE = 16
"""Between two parts of JSON; a model that has lost its way would else write nothing but line ends up to its limit."""


class InvalidForm(UserError):
    """A structured output that cannot be had.

    Args:
        place: what of it is at fault, as in `.json.properties.a.pattern`.
        problem: one line that continues a sentence beginning with the place.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"structured_outputs{place}: {problem}")
        self.place = place
        self.problem = problem


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these. Names and meanings are vLLM's."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema that the output must match, as an object or its text. Unlike vLLM's, JSON has at most 16
    characters of whitespace in one place."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which the output is."""
    grammar: str | None = None
    """A grammar in the EBNF of llama.cpp (GBNF), whose root rule is `root`."""
    json_object: bool | None = None
    """True: any JSON object, whose whitespace is bounded as that of `json`."""

    def __post_init__(self) -> None:
        given = self._all_given()
        if len(given) != 1:
            found, possible = " and ".join(given) or "nothing", ", ".join(vars(self))
            raise UserError(f"structured_outputs gives {found}, it must give one of {possible}")
        self._require_types()

    @property
    def given(self) -> tuple[str, object]:
        """The name and value of what is given."""
        ((name, value),) = self._all_given().items()
        return name, value

    @property
    def text(self) -> str:
        """What is given, as text.

        Raises:
            TypeError, ValueError: it is no JSON.
        """
        _, value = self.given
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)

    def _all_given(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}

    def _require_types(self) -> None:
        name, value = self.given
        texts = isinstance(self.choice, Sequence) and not isinstance(self.choice, str) and len(self.choice) > 0
        fits, what = {
            "json": (isinstance(value, str | Mapping), "a JSON schema, as an object or its text"),
            "regex": (isinstance(value, str), "a text"),
            "choice": (texts and all(isinstance(one, str) and one for one in self.choice or ()), "a list of texts"),
            "grammar": (isinstance(value, str), "a text"),
            "json_object": (value is True, "true"),
        }[name]
        if not fits:
            raise UserError(f"structured_outputs.{name} is {value!r}, it must be {what}")
