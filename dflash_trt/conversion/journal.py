"""What an unfinished conversion has done, so that taking it up again does not do it twice."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.conversion.calibration import Calibration
from dflash_trt.errors import UserError, access

JOURNAL_FILE = "unfinished.json"
_CHUNK = 1 << 22


class Journal:
    """A file that is rewritten after every step, beside what the steps wrote.

    Args:
        directory: the unfinished conversion.
        settings: everything that the result depends on, as JSON values.

    Raises:
        UserError: the directory holds a journal of other settings, or one that is damaged.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._path = directory / JOURNAL_FILE
        self._calibrations: dict[str, dict[str, Any]] = {}
        self._shards: dict[str, str] = {}
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        if self._path.exists():
            found = JsonObject.from_file(self._path)
            self._refuse_other(dict(found.object("settings").values))
            calibrations, finished = found.object("calibrations"), found.object("shards")
            self._calibrations = {model: dict(calibrations.object(model).values) for model in calibrations.values}
            self._shards = {shard: finished.text(shard) for shard in finished.values}

    def calibration(self, model: str) -> Calibration | None:
        """What was found by running `model`, if it was run."""
        found = self._calibrations.get(model)
        return None if found is None else Calibration(**found)

    def record_calibration(self, model: str, calibration: Calibration) -> None:
        """Keep it."""
        self._calibrations[model] = asdict(calibration)
        self._write()

    def has(self, shard: Path) -> bool:
        """Whether `shard`, a file below the journal's directory, was finished and still holds what it held then."""
        recorded = self._shards.get(self._key(shard))
        return recorded is not None and shard.is_file() and recorded == checksum(shard)

    def record_shard(self, shard: Path) -> None:
        """Keep its checksum."""
        self._shards[self._key(shard)] = checksum(shard)
        self._write()

    @property
    def is_empty(self) -> bool:
        """Nothing was recorded."""
        return not self._calibrations and not self._shards

    def remove(self) -> None:
        """The conversion is finished."""
        self._path.unlink(missing_ok=True)

    def _key(self, shard: Path) -> str:
        return str(shard.relative_to(self._path.parent))

    def _refuse_other(self, found: dict[str, Any]) -> None:
        for key in (*self._settings, *found):
            if found.get(key) != self._settings.get(key):
                raise UserError(
                    f"{self._path}: was begun with {key} {json.dumps(found.get(key))}, now it is "
                    f"{json.dumps(self._settings.get(key))}; give the same again, or remove {self._path.parent}"
                )

    def _write(self) -> None:
        content = {"settings": self._settings, "calibrations": self._calibrations, "shards": self._shards}
        new = self._path.with_suffix(".new")
        with access(self._path, "written"):
            new.write_text(json.dumps(content, indent=1))
            os.replace(new, self._path)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with access(path, "read"), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(path: Path) -> str:
    """What tells that a checkpoint is still the same without reading it: a digest of its files' sizes and times."""
    with access(path, "read"):
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
