"""A request's field that is wrong."""

from __future__ import annotations

from dflash_trt.errors import UserError


class InvalidField(UserError):
    """Says what is wrong with one field of a request.

    Args:
        field: its path, as in `tools[1].function.name`.
        problem: continues a sentence that begins with the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
