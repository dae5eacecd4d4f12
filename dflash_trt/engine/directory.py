"""The engine directory: complete, written whole or not at all, and checked when it is opened."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt import __version__
from dflash_trt.engine.config import EngineConfig
from dflash_trt.errors import UserError

CONFIG_FILE = "config.json"
_CONFIG = TypeAdapter(EngineConfig)


@dataclass(frozen=True)
class Engine:
    """An opened engine directory."""

    path: Path
    config: EngineConfig

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The target's tokenizer, with its chat template where it has one.

        Raises:
            UserError: its files are missing or damaged.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: its tokenizer cannot be loaded ({str(error).splitlines()[0]})") from None
        return cast(PreTrainedTokenizerFast, tokenizer)

    @property
    def target_weights(self) -> Path:
        """The torch backend's target weights."""
        return self.path / "target" / "rank0.safetensors"

    @property
    def drafter_weights(self) -> Path:
        """The torch backend's drafter weights."""
        return self.path / "drafter" / "rank0.safetensors"


def open_engine(path: Path) -> Engine:
    """Read an engine directory's config.

    Raises:
        UserError: there is no engine, it was made by another version, or its config is damaged.
    """
    file = path / CONFIG_FILE
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{path}: is no engine directory, {CONFIG_FILE} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error})") from None
    if not isinstance(content, dict) or "build_config" not in content:
        raise UserError(f"{file}: is no engine's config; run `dflash-trt build` on a checkpoint first")
    if _release(str(content.get("version"))) != _release(__version__):
        raise UserError(
            f"{file}: version is {content.get('version')}, this is dflash-trt {__version__}; build the engine again"
        )
    try:
        return Engine(path, _CONFIG.validate_python(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where} is {first['input']!r}: {first['msg']}") from None


def write_config(directory: Path, config: EngineConfig) -> None:
    """Write config.json."""
    (directory / CONFIG_FILE).write_bytes(_CONFIG.dump_json(config, indent=2) + b"\n")


@contextmanager
def written_whole(output_dir: Path) -> Iterator[Path]:
    """A sibling of `output_dir` to write into, which takes its name if the block ends well and is removed if not.

    An engine directory that stands there is replaced; anything else is left alone.

    Raises:
        UserError: `output_dir` holds something that is no engine, or its parent cannot be written to.
    """
    if output_dir.exists() and not _replaceable(output_dir):
        raise UserError(f"{output_dir}: exists and is no engine directory; give --output_dir another name")
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=output_dir.parent))
    except OSError as error:
        raise UserError(f"{output_dir}: cannot be written ({error.strerror})") from None
    try:
        yield temporary
        temporary.chmod(0o755)
        if output_dir.exists():
            shutil.rmtree(output_dir)
        temporary.rename(output_dir)
    except OSError as error:
        raise UserError(f"{output_dir}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replaceable(path: Path) -> bool:
    if not path.is_dir():
        return False
    if not any(path.iterdir()):
        return True
    try:
        return "build_config" in json.loads((path / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False


def _release(version: str) -> list[str]:
    """Engines serve within one minor release."""
    return version.split(".")[:2]
