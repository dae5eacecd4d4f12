"""The engine directory: complete, written whole or not at all, and checked when it is opened."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from dflash_trt import __version__
from dflash_trt.checkpoint.example_prompts import EXAMPLE_PROMPTS_FILE
from dflash_trt.checkpoint.json_object import read_json
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.checkpoint.tokenizer import TEMPLATES_DIR, TOKENIZER_FILES, load_tokenizer
from dflash_trt.engine.config import EngineConfig
from dflash_trt.engine.writer_lock import only_writer
from dflash_trt.errors import UserError, access

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONFIG = TypeAdapter(EngineConfig)
_ENTRIES = {CONFIG_FILE, "target", "drafter", EXAMPLE_PROMPTS_FILE, *TOKENIZER_FILES, TEMPLATES_DIR}
"""All that a build writes."""


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
        return load_tokenizer(self.path)

    def rank_files(self, rank: int) -> tuple[Path, Path]:
        """The torch backend's weights of one rank, the target's and the drafter's."""
        return rank_files(self.path, rank)

    def tensorrt_files(self, rank: int) -> tuple[Path, Path, Path]:
        """A TensorRT backend's of one rank: weights that both engines share, the target's engine, the drafter's."""
        target, drafter = self.path / "target", self.path / "drafter"
        return target / f"rank{rank}.safetensors", target / f"rank{rank}.engine", drafter / f"rank{rank}.engine"

    @property
    def target_weights(self) -> Path:
        """The target's of rank 0, which is all of it where there is no other."""
        return self.rank_files(0)[0]

    @property
    def drafter_weights(self) -> Path:
        """As `target_weights`, the drafter's."""
        return self.rank_files(0)[1]


def rank_files(directory: Path, rank: int) -> tuple[Path, Path]:
    """A rank's weights of target and drafter, in an engine of the torch backend or while others are built of them."""
    name = f"rank{rank}.safetensors"
    return directory / "target" / name, directory / "drafter" / name


def open_engine(path: Path) -> Engine:
    """Read an engine directory's config.

    Raises:
        UserError: there is no engine, it was made by another version, or its config is damaged.
    """
    file = path / CONFIG_FILE
    if not is_file(file):
        raise UserError(f"{path}: is no engine directory, it has no {CONFIG_FILE}")
    content = read_json(file)
    if not isinstance(content, dict) or not is_engine_config(content):
        raise UserError(f"{file}: is no engine's config; run `dflash-trt build` on a checkpoint first")
    if _release(str(content.get("version"))) != _release(__version__):
        raise UserError(
            f"{file}: version is {content.get('version')}, this is dflash-trt {__version__}; build the engine again"
        )
    try:
        config = _CONFIG.validate_python(content)
        check_pairing(config.pretrained_config, file, config.speculative_config, file)
        return Engine(path, config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":  # its input is the object that lacks the key
            raise UserError(f"{file}: {where} is required") from None
        raise UserError(f"{file}: {where} is {first['input']!r}: {first['msg']}") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def write_config(directory: Path, config: EngineConfig) -> None:
    """Write config.json."""
    (directory / CONFIG_FILE).write_bytes(_CONFIG.dump_json(config, indent=2) + b"\n")


def check_output_dir(output_dir: Path) -> Path:
    """The place that `output_dir` names, links followed, seen to be free or an engine, and to be writable.

    Raises:
        UserError: something stands there that is no engine, or no directory can be made beside it.
    """
    with access(output_dir, "written"):
        place = Path(os.path.realpath(output_dir))
        if place.is_symlink() or (place.exists() and not _replaceable(place)):
            raise UserError(
                f"{output_dir}: exists and is no engine directory, or holds more than an engine; give --output_dir "
                "another name"
            )
        if place.is_mount():
            raise UserError(f"{output_dir}: is a mount point, which cannot be replaced; name a directory inside it")
        # Asking for permission is not enough: a file system may refuse all the same.
        ancestor = next(parent for parent in place.parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=ancestor):
            pass
    return place


def check_output_file(file: Path) -> None:
    """See that a file can be written, by opening it as it is or, where there is none, making one and removing it.

    Raises:
        UserError: it cannot.
    """
    with access(file, "written"):
        place = Path(os.path.realpath(file))
        is_new = not is_file(place)
        with place.open("ab"):
            pass
        if is_new:
            place.unlink()


@contextmanager
def written_whole(output_dir: Path) -> Iterator[Path]:
    """A sibling of `output_dir` to write into, which takes its name if the block ends well and is removed if not.

    An engine directory that stands there is replaced, and stays until then; anything else is left alone. What a process
    has left here that was killed is removed.

    Raises:
        UserError: as `check_output_dir`, or another process is writing here; what the block raises is let through.
    """
    place = check_output_dir(output_dir)
    missing_parents = [parent for parent in place.parents if not parent.exists()]
    new, old, lock = (place.with_name(f".{place.name}.dflash-trt-{what}") for what in ("new", "old", "lock"))
    try:
        with access(output_dir, "written"):
            place.parent.mkdir(parents=True, exist_ok=True)
        with _held(output_dir, place, lock), _swapped(output_dir, place, new, old):
            yield new
    finally:
        with suppress(OSError):  # those that hold the engine are not empty
            for parent in missing_parents:
                parent.rmdir()


@contextmanager
def _held(output_dir: Path, place: Path, lock: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with access(output_dir, "written"):
            stack.enter_context(only_writer(place, lock))
        yield


@contextmanager
def _swapped(output_dir: Path, place: Path, new: Path, old: Path) -> Iterator[None]:
    """`new`, made empty, takes the place of `place` if the block ends well."""
    try:
        with access(output_dir, "written"):
            _undo(place, new, old)
            new.mkdir()
        yield
        with access(output_dir, "written"):
            if place.exists():
                place.rename(old)
            new.rename(place)
        if old.exists():
            with access(old, "removed"):
                shutil.rmtree(old)
    finally:
        with suppress(OSError):
            _undo(place, new, old)


def _undo(place: Path, new: Path, old: Path) -> None:
    """What a process has begun, this one or one that was killed: an engine that it was about to replace comes back."""
    if old.exists() and not place.exists():
        old.rename(place)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def is_engine_config(content: object) -> bool:
    """Whether a parsed config.json is an engine's of ours; TensorRT-LLM's have a `build_config` too."""
    return isinstance(content, dict) and {"build_config", "speculative_config", "builder"} <= content.keys()


def _replaceable(path: Path) -> bool:
    """Empty, or an engine with nothing in it that a build does not write."""
    if not path.is_dir():
        return False
    entries = {entry.name for entry in path.iterdir()}
    if not entries:
        return True
    try:
        content = read_json(path / CONFIG_FILE)
    except UserError:
        return False
    return is_engine_config(content) and entries <= _ENTRIES


def _release(version: str) -> list[str]:
    """Engines serve within one minor release."""
    return version.split(".")[:2]
