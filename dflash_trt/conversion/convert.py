"""Converting a target and its drafter: checked first, written whole, and taken up again where it broke off."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from dflash_trt import __version__
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.tokenizer import load_tokenizer, write_files
from dflash_trt.conversion.calibration import Calibration, calibration_dtype
from dflash_trt.conversion.calibration_text import check_samples, read_samples
from dflash_trt.conversion.drafter_calibration import calibrate_drafter
from dflash_trt.conversion.journal import JOURNAL_FILE, Journal, checksum, fingerprint
from dflash_trt.conversion.plan import Formats, ModelPlan, plan_drafter, plan_target
from dflash_trt.conversion.shards import Advance, convert_shard, shards, workers, write_index
from dflash_trt.conversion.target_calibration import calibrate_target
from dflash_trt.conversion.tensors import specs
from dflash_trt.errors import UserError, access

Bar = Callable[[str, int, Literal["bytes", "samples"]], AbstractContextManager[Advance]]
"""Shows progress: what is done, how much of it there is, and in what."""


@dataclass(frozen=True)
class CalibrationData:
    """The text that the models are run on.

    Attributes:
        path: JSONL or plain text.
        size: samples that are taken from it, at most.
        max_length: tokens of a sample, at most.
    """

    path: Path
    size: int
    max_length: int

    def settings(self) -> dict[str, Any]:
        """What a result owes to it."""
        return {
            "calib_dataset": checksum(self.path),
            "calib_size": self.size,
            "calib_seq_len": self.max_length,
        }


@dataclass(frozen=True)
class Conversion:
    """A conversion that was checked, and only has to be run."""

    target: TargetCheckpoint
    target_plan: ModelPlan
    drafter: DrafterCheckpoint | None
    drafter_plan: ModelPlan | None
    samples: list[list[int]]
    settings: dict[str, Any]
    """All that the result depends on."""
    output_dir: Path

    @property
    def plans(self) -> dict[str, ModelPlan]:
        """What becomes of each model, by the name of its directory."""
        plans = {"target": self.target_plan}
        return plans if self.drafter_plan is None else {**plans, "drafter": self.drafter_plan}

    def run(self, bar: Bar = lambda what, total, unit: nullcontext(lambda amount: None)) -> dict[str, str]:
        """Calibrate and write; where it was begun before, go on.

        Returns:
            Of every model, how it was calibrated, in one line.

        Raises:
            UserError: a tensor cannot be quantized, a scale cannot be found, or the output cannot be written. What was
                finished until then is kept for another run, unless that is nothing.
        """
        with _unfinished(self.output_dir, self.settings) as (directory, journal):
            calibrations = {name: self._calibration(name, plan, journal, bar) for name, plan in self.plans.items()}
            total = sum(shard.nbytes for plan in self.plans.values() for shard in shards(plan.weights))
            with bar("converting", total, "bytes") as advance:
                for name, plan in self.plans.items():
                    _write_model(plan, calibrations[name], directory / name, journal, advance)
        return {
            name: "every weight's own largest magnitude" if calibration is None else calibration.method
            for name, calibration in calibrations.items()
            if self.plans[name].quantization is not None
        }

    def _calibration(self, name: str, plan: ModelPlan, journal: Journal, bar: Bar) -> Calibration | None:
        if not plan.needs_calibration:
            return None
        found = journal.calibration(name)
        if found is None:
            with bar(f"calibrating {name}", len(self.samples), "samples") as advance:
                found = self._calibrate(name, plan, advance)
            journal.record_calibration(name, found)
        return found

    def _calibrate(self, name: str, plan: ModelPlan, advance: Advance) -> Calibration:
        kv_cache = bool(plan.attentions)
        if name == "target":
            return calibrate_target(
                self.target, self.samples, plan.calibrated_inputs, kv_cache=kv_cache, progress=advance
            )
        assert self.drafter is not None
        return calibrate_drafter(
            self.target, self.drafter, self.samples, plan.calibrated_inputs, kv_cache=kv_cache, progress=advance
        )


def plan_conversion(
    target: TargetCheckpoint,
    target_formats: Formats,
    drafter: DrafterCheckpoint | None,
    drafter_formats: Formats,
    calibration: CalibrationData | None,
    output_dir: Path,
    *,
    resume: bool = False,
) -> Conversion:
    """Check all that can be checked from headers, and read the calibration text.

    Raises:
        UserError: a checkpoint is damaged or quantized already, the two do not belong together, the formats cannot be
            had, the text is missing or not needed, or `output_dir` is taken or holds another conversion that broke off.
    """
    place = _check_output_dir(output_dir, resume)
    if drafter is not None:
        check_pairing(target.config, target.path, drafter.config, drafter.path)
    target_plan = plan_target(target, target_formats)
    drafter_plan = None if drafter is None else plan_drafter(drafter, drafter_formats)
    plans = [plan for plan in (target_plan, drafter_plan) if plan is not None]
    needed = any(plan.needs_calibration for plan in plans)
    if needed and calibration is None:
        wanting = _calibrated(target_formats, None if drafter is None else drafter_formats)
        raise UserError(
            f"calib_dataset: is needed for {wanting}, whose scales only running the model on text shows; give it, or "
            "choose w4a16_nvfp4 or bf16 and no FP8 cache"
        )
    if calibration is not None and not needed:
        raise UserError(f"calib_dataset {calibration.path}: is not needed, no chosen format has a scale to calibrate")
    samples = []
    if calibration is not None:
        tokenizer = _tokenizer(target_plan, target.path)
        samples = read_samples(calibration.path, tokenizer, calibration.size, calibration.max_length)
        check_samples(samples, calibration.path, target)
        calibration_dtype(target)  # refuses a target of several types
    settings = {
        "version": __version__,
        **_settings("target", target.path, target_formats),
        **({} if drafter is None else _settings("drafter", drafter.path, drafter_formats)),
        **({} if calibration is None else calibration.settings()),
    }
    Journal(unfinished_dir(place), settings)  # refuses what cannot be taken up
    return Conversion(target, target_plan, drafter, drafter_plan, samples, settings, place)


def _settings(model: str, path: Path, formats: Formats) -> dict[str, Any]:
    chosen = {f"{model} {option}": value for option, value in asdict(formats).items()}
    return {f"{model}_dir": str(path.resolve()), **fingerprint(path, f"{model}_dir"), **chosen}


def summary(plan: ModelPlan) -> str:
    """What becomes of a model, in a few words."""
    nbytes = sum(spec.nbytes for name in plan.weights.names() for spec in specs(plan, name))
    layers = f"{len(plan.quantized)} linear layers in {plan.algo}" if plan.quantized else "nothing quantized"
    caches = ", caches in FP8" if plan.attentions else ""
    return f"{layers}{caches}, {nbytes / 1e6:.1f} MB"


def _calibrated(target: Formats, drafter: Formats | None) -> str:
    """The options that ask for calibration."""
    found = []
    for prefix, formats in (("", target), ("drafter_", drafter)):
        if formats is not None and formats.qformat in ("fp8", "nvfp4"):
            found.append(f"{prefix}qformat {formats.qformat}")
        if formats is not None and formats.kv_cache_qformat == "fp8":
            found.append(f"{prefix}kv_cache_qformat fp8")
    return " and ".join(found)


def unfinished_dir(output_dir: Path) -> Path:
    """Where a conversion is written until it is complete."""
    return output_dir.with_name(f"{output_dir.name}.unfinished")


def _check_output_dir(output_dir: Path, resume: bool) -> Path:
    with access(output_dir, "written"):
        place = Path(os.path.realpath(output_dir))
        if place.is_symlink() or (place.exists() and not (place.is_dir() and not any(place.iterdir()))):
            raise UserError(f"{output_dir}: exists and is not empty; give --output_dir another name, or remove it")
        if place.is_mount():
            raise UserError(f"{output_dir}: is a mount point, which cannot be replaced; name a directory inside it")
        ancestor = next(parent for parent in place.parents if parent.exists())
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=ancestor):
            pass
    unfinished = unfinished_dir(place)
    if (unfinished / JOURNAL_FILE).is_file() and not resume:
        raise UserError(f"{unfinished}: holds a conversion that broke off; go on with --resume, or remove it")
    return place


def _tokenizer(plan: ModelPlan, origin: Path) -> PreTrainedTokenizerFast:
    with tempfile.TemporaryDirectory() as directory:
        write_files(Path(directory), plan.files)
        return load_tokenizer(Path(directory), origin)


@contextmanager
def _unfinished(output_dir: Path, settings: dict[str, Any]) -> Iterator[tuple[Path, Journal]]:
    """A sibling of `output_dir` that takes its name if the block ends well, and else is kept if it holds anything."""
    directory = unfinished_dir(output_dir)
    journal = Journal(directory, settings)
    missing_parents = [parent for parent in directory.parents if not parent.exists()]
    with access(output_dir, "written"):
        directory.mkdir(parents=True, exist_ok=True)
    with _only_one(directory):
        try:
            journal.begin()
            yield directory, journal
        except BaseException:
            if journal.is_empty:
                shutil.rmtree(directory, ignore_errors=True)
                with suppress(OSError):  # one that others use by now is not empty
                    for parent in missing_parents:
                        parent.rmdir()
            raise
        with access(output_dir, "written"):
            if output_dir.exists():
                output_dir.rmdir()
            directory.rename(output_dir)
            (output_dir / JOURNAL_FILE).unlink()


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """No other process writes to the directory meanwhile. The system lets go of it however this one ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{directory}: another process is converting into it; wait for that, or stop it") from None
    finally:
        os.close(descriptor)


def _write_model(
    plan: ModelPlan, calibration: Calibration | None, directory: Path, journal: Journal, advance: Advance
) -> None:
    with access(directory, "written"):
        directory.mkdir(exist_ok=True)
        write_files(directory, plan.files)
    write_index(plan, directory)
    with workers() as running:
        for shard in shards(plan.weights):
            output = directory / shard.output_name
            if journal.has(output):
                advance(shard.nbytes)
                continue
            convert_shard(plan, shard, calibration, output, running, advance)
            journal.record_shard(output)
