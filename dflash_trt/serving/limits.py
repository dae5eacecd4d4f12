"""What one request may hold, derived from the longest sequence that the engine takes."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

_BYTES_PER_TOKEN = 32
"""Of JSON: a token of text has about 4, written as \\u escapes up to 12, a token id with its comma 8."""
_BYTES_BESIDE = 2**20
"""For schemas, tools, parameters, and batches of shorter prompts."""
_BODIES = 64
"""Bodies of full length that may be held at once."""
_BYTES_PER_VALUE = 8
_VALUES_BESIDE = 2**16


@dataclass(frozen=True)
class RequestLimits:
    """Limits that every prompt of `max_seq_len` tokens fits into."""

    max_body_size: int
    """Bytes of one body."""
    max_held: int
    """Bytes of all bodies of requests that are being answered."""
    max_values: int
    """JSON values in a body, nested ones included."""
    max_messages: int
    """In a conversation: each takes at least one token."""
    max_characters: int
    """Of a prompt: as many of the longest token as a sequence can have."""


def request_limits(
    tokenizer: PreTrainedTokenizerFast, *, max_seq_len: int, max_body_size: int | None = None
) -> RequestLimits:
    """The limits of a server.

    Args:
        tokenizer: the model's; texts of byte-level tokens have a character for every byte.
        max_seq_len: tokens of the longest sequence.
        max_body_size: bytes; None: 1 MiB, and 32 for every token of a sequence.
    """
    body = _BYTES_BESIDE + _BYTES_PER_TOKEN * max_seq_len if max_body_size is None else max_body_size
    return RequestLimits(
        max_body_size=body,
        max_held=_BODIES * body,
        max_values=_VALUES_BESIDE + body // _BYTES_PER_VALUE,
        max_messages=max_seq_len,
        max_characters=max_seq_len * max(map(len, tokenizer.get_vocab())),
    )
