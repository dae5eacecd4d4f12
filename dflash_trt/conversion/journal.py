"""What an unfinished conversion has done, so that taking it up again does not do it twice."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.regular_file import check_file
from dflash_trt.conversion.calibration import Calibration
from dflash_trt.errors import UserError, access

JOURNAL_FILE = "unfinished.json"
_CHUNK = 1 << 22
_CALIBRATIONS = TypeAdapter(dict[str, Calibration])


class Journal:
    """A file that is rewritten after every step, beside what the steps wrote.

    Args:
        directory: the unfinished conversion.
        settings: everything that the result depends on, as JSON values.

    Raises:
        UserError: the directory holds a journal of other settings, one that is damaged, or files and no journal.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._path = directory / JOURNAL_FILE
        self._calibrations: dict[str, Calibration] = {}
        self._shards: dict[str, str] = {}
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        with access(directory, "read"):
            is_taken = directory.exists() and any(directory.iterdir())
        if is_taken:
            self._read()

    def _read(self) -> None:
        directory = self._path.parent
        if not self._path.exists():
            raise UserError(f"{directory}: holds files, but no {JOURNAL_FILE} of a conversion; move or remove it")
        try:
            found = JsonObject.from_file(self._path)
            settings, finished = found.object("settings").values, found.object("shards")
            self._calibrations = _CALIBRATIONS.validate_python(found.object("calibrations").values)
            self._shards = {shard: finished.text(shard) for shard in finished.values}
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("calibrations", *first["loc"])))
            raise UserError(f"{self._path}: is damaged, {where}: {first['msg']}; remove {directory}") from None
        except UserError as error:
            raise UserError(f"{error}; put it right, or remove {directory}") from None
        self._refuse_other(dict(settings))

    def begin(self) -> None:
        """Say what is being done before any of it is, so that whatever breaks off can be told from anything else."""
        if not self._path.exists():
            self._write()

    def calibration(self, model: str) -> Calibration | None:
        """What was found by running `model`, if it was run."""
        return self._calibrations.get(model)

    def record_calibration(self, model: str, calibration: Calibration) -> None:
        """Keep it."""
        self._calibrations[model] = calibration
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

    def _key(self, shard: Path) -> str:
        return str(shard.relative_to(self._path.parent))

    def _refuse_other(self, found: dict[str, Any]) -> None:
        for key in (*self._settings, *found):
            before, now = found.get(key), self._settings.get(key)
            if before != now:
                raise UserError(
                    f"{self._path}: was begun with {key} {json.dumps(before)}, now it is {json.dumps(now)}; give the "
                    f"same again, or remove {self._path.parent}"
                )

    def _write(self) -> None:
        calibrations = {model: asdict(found) for model, found in self._calibrations.items()}
        content = {"settings": self._settings, "calibrations": calibrations, "shards": self._shards}
        new = self._path.with_suffix(".new")
        with access(self._path, "written"):
            new.write_text(json.dumps(content, indent=1))
            os.replace(new, self._path)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    check_file(path)
    with access(path, "read"), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fingerprint(path: Path, option: str) -> dict[str, str]:
    """What tells that a checkpoint is the same without reading it: size and time of change of each of its files."""
    with access(path, "read"):
        files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
        states = [(file.name, file.stat()) for file in files]
    changed = [(name, datetime.fromtimestamp(state.st_mtime_ns / 1e9).isoformat(), state) for name, state in states]
    return {f"{option}/{name}": f"{state.st_size} bytes of {time}" for name, time, state in changed}
