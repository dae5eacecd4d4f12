"""What form a structured output must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import UserError


@dataclass(frozen=True)
class StructuredOutputs:
    """Exactly one of these. Names and meanings are vLLM's."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema that the output must match, as an object or its text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which the output is."""
    grammar: str | None = None
    """A grammar in the EBNF of llama.cpp, whose root rule is `root`."""
    json_object: bool | None = None
    """True: any JSON object."""

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None and value is not False]
        if len(given) != 1:
            found, possible = " and ".join(given) or "nothing", ", ".join(vars(self))
            raise UserError(f"structured_outputs gives {found}, it must give one of {possible}")
