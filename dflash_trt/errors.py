"""The one exception that a user's mistake becomes."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: a file, an option, a pairing.

    The message is one line that says what is wrong, where, with which value, and what would work.
    The command line prints it and exits with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
