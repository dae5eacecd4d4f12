"""The one exception that a user's mistake becomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


class UserError(Exception):
    """Something the user can put right: a file, an option, a pairing.

    The message is one line that says what is wrong, where, with which value, and what would work.
    The command line prints it and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


@contextmanager
def access(path: Path, what: Literal["read", "written", "removed"]) -> Iterator[None]:
    """What the system refuses in the block is a `UserError` that names `path` and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be {what} ({error.strerror or error})") from None
