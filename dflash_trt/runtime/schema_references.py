"""What the references of a JSON schema point to, inside the schema itself: nothing is ever fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urldefrag, urljoin

from jsonschema_rs import Draft202012Validator, Registry

from dflash_trt.runtime.schema_keywords import NAMED_SCHEMAS, SCHEMA, SCHEMAS
from dflash_trt.runtime.unsupported_schema import Path, UnsupportedSchema

_INDEX = re.compile(r"0|[1-9]\d{0,8}")


class References:
    """Resolves the references of one schema.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._base = urldefrag(str(root.get("$id", "")))[0]
        self._anchors: dict[str, Path] | None = None

    def target(self, reference: str, at: Path) -> tuple[Path, Any]:
        """Where a reference leads, and what is there.

        Args:
            at: where it stands.

        Raises:
            UnsupportedSchema: it leads out of the schema, or to nothing.
        """
        document, fragment = urldefrag(reference if reference.startswith("#") else urljoin(self._base, reference))
        if document not in ("", self._base):
            raise UnsupportedSchema(at, f"is {reference!r}; schemas outside of this one are not supported")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            path = self._all_anchors().get(fragment)
        else:
            path = self._follow(fragment, at)
        if path is None:
            raise UnsupportedSchema(at, f"is {reference!r}, which leads to nothing in this schema")
        return path, _at(self._root, path)

    def accepted(self, values: list[Any], path: Path, at: Path) -> list[Any]:
        """Those of the values that the schema at a path accepts, by a validator of its own.

        Args:
            at: what to name where they cannot be told.

        Raises:
            UnsupportedSchema: a reference in the schema leads out of it.
        """
        pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)
        try:
            validator = Draft202012Validator(
                {"$ref": f"urn:schema#{quote(pointer, safe='/~$')}"}, registry=self._registry
            )
            return [value for value in values if validator.is_valid(value)]
        except Exception as error:  # of several kinds, by what the schema holds; each is the schema's fault
            raise UnsupportedSchema(at, f"cannot be compared with what stands beside it ({_line(error)})") from None

    @cached_property
    def _registry(self) -> Registry:
        root = {key: value for key, value in self._root.items() if key not in ("$id", "$schema")}
        return Registry([("urn:schema", root)], retriever=_refuse)

    def _follow(self, pointer: str, at: Path) -> Path | None:
        path: Path = ()
        found: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                path, found = (*path, key), found[key]
            elif isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
                path, found = (*path, int(key)), found[int(key)]
            else:
                return None
            if isinstance(found, Mapping) and isinstance(found.get("$id"), str):
                raise UnsupportedSchema((*path, "$id"), "is not supported below the root")
        return path

    def _all_anchors(self) -> dict[str, Path]:
        if self._anchors is None:
            self._anchors = {
                schema[keyword]: path
                for path, schema in _walk(self._root, ())
                for keyword in ("$dynamicAnchor", "$anchor")
                if isinstance(schema.get(keyword), str)
            }
        return self._anchors


def _walk(schema: Any, path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Schemas and where they stand, without those that have an `$id`, whose anchors are their own."""
    if not isinstance(schema, Mapping) or (path and "$id" in schema):
        return
    yield path, schema
    for key, value in schema.items():
        if key in SCHEMA:
            yield from _walk(value, (*path, key))
        elif key in SCHEMAS and isinstance(value, list):
            for index, each in enumerate(value):
                yield from _walk(each, (*path, key, index))
        elif key in NAMED_SCHEMAS and isinstance(value, Mapping):
            for name, each in value.items():
                yield from _walk(each, (*path, key, name))


def _at(found: Any, path: Path) -> Any:
    for part in path:
        found = found[part]
    return found


def _refuse(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside of the schema")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
