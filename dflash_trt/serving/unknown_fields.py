"""Fields of a request that nothing here reads: refused where they would change the answer, else ignored and named."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.peer_fields import PeerField

_LOGGER = logging.getLogger(__name__)
_INDEX = re.compile(r"\[\d+\]")
_NAMED = 16
"""Ignored fields that a response names."""
_COUNTED = 128
"""Names that are counted one by one; clients may invent any number."""
_OTHERS = "others"


def ignored_fields(
    model: BaseModel, body: Mapping[str, Any], peers: Mapping[str, PeerField], *, strict: bool
) -> list[str]:
    """The paths of what a body has and its model does not, without indices, each once.

    Args:
        model: made of `body`.
        peers: fields that are refused, by path.
        strict: refuse every field.

    Raises:
        InvalidField: a field is refused.
    """
    ignored: dict[str, None] = {}
    for path, value in _unknown(model, body, ""):
        name = _INDEX.sub("[]", path)
        peer = peers.get(name)
        if peer is not None and not peer.allows(value):
            raise InvalidField(path, _refusal(peer, value))
        if peer is not None or value is None:
            continue
        if strict:
            raise InvalidField(path, "no such field")
        ignored[printable(name)] = None
    return list(ignored)


def _refusal(peer: PeerField, value: Any) -> str:
    found = f"is {value!r:.40}, " if isinstance(value, bool | int | float | str) else ""
    return f"{found}not supported: {peer.reason}"


def _unknown(model: Any, raw: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Paths and values, in objects that the model has as objects of its own."""
    if isinstance(model, BaseModel) and isinstance(raw, dict):
        attributes = {field.alias or name: name for name, field in type(model).model_fields.items()}
        for key, value in raw.items():
            inner = f"{path}.{key}" if path else key
            if key in attributes:
                yield from _unknown(getattr(model, attributes[key]), value, inner)
            else:
                yield inner, value
    elif isinstance(model, list) and isinstance(raw, list) and model and isinstance(model[0], BaseModel):
        for index, (each, value) in enumerate(zip(model, raw, strict=False)):
            yield from _unknown(each, value, f"{path}[{index}]")


def printable(name: str) -> str:
    """A client's name as it may stand in headers, logs and labels."""
    return re.sub(r"[^A-Za-z0-9_.\-\[\]]", "?", name[:64])


def header(names: Sequence[str]) -> str:
    """Names for a response's header."""
    rest = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"{rest} more"] if rest > 0 else [])])


class IgnoredFields:
    """Counts ignored fields, and logs each name once.

    Args:
        count: told of a name for each request that has it.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._seen: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """A request had these."""
        for name in names:
            if name not in self._seen and len(self._seen) < _COUNTED:
                self._seen.add(name)
                _LOGGER.warning("requests have a field that nothing here reads, and that is ignored: %s", name)
            self._count(name if name in self._seen else _OTHERS)
