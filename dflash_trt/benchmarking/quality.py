"""Measuring what a conversion cost: in weights, on text, and in accepted drafts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from dflash_trt import __version__
from dflash_trt.benchmarking.acceptance import Acceptance, PairAcceptance, measure_acceptance
from dflash_trt.benchmarking.quality_report import QualityReport
from dflash_trt.benchmarking.text_quality import compare_on_text
from dflash_trt.benchmarking.weight_error import WeightErrors, layer_bytes, weight_errors
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.tokenizer import load_tokenizer, save_tokenizer
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.conversion.calibration_text import check_samples, read_samples
from dflash_trt.conversion.convert import Bar
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest
from dflash_trt.runtime.load import memory_of

MAX_TOKENS = 64
"""Output tokens of a prompt when drafts are counted."""


@dataclass(frozen=True)
class Models:
    """A target and, where there is one, its drafter: originals, or what they were converted to."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint | None


@dataclass(frozen=True)
class HeldOutText:
    """What the models are run on.

    Attributes:
        samples: token ids, two or more each.
        tokenizer: the target's.
        dtype: to compute in; packed weights and FP8 caches stay what they are.
    """

    samples: Sequence[Sequence[int]]
    tokenizer: PreTrainedTokenizerFast
    dtype: torch.dtype


def read_held_out_text(
    path: Path, target: TargetCheckpoint, *, size: int, max_length: int, dtype: torch.dtype
) -> HeldOutText:
    """The first samples of a file, as `read_samples` reads them with the target's tokenizer, without single tokens.

    Raises:
        UserError: the file or the tokenizer is damaged, no sample has two tokens, or the target cannot be run
            on them.
    """
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(target.path, Path(directory))
        tokenizer = load_tokenizer(Path(directory), target.path)
    samples = [ids for ids in read_samples(path, tokenizer, size, max_length) if len(ids) > 1]
    if not samples:
        raise UserError(f"{path}: its samples are single tokens, after which there is nothing to predict")
    check_samples(samples, path, target)
    return HeldOutText(samples, tokenizer, dtype)


def measure_quality(
    original: Models,
    converted: Models,
    text: HeldOutText | None,
    *,
    memory: int,
    bar: Bar = lambda what, total, unit: nullcontext(lambda amount: None),
) -> QualityReport:
    """Compare converted models with what they were converted from.

    Args:
        original: unquantized.
        converted: the same models, a drafter where `original` has one.
        text: what to run them on; None compares weights only.
        memory: bytes that the weights of models that are run may take; others are not run, and the report says so.
        bar: shows progress.

    Raises:
        UserError: a checkpoint is damaged, or `converted` is not made from `original`.
    """
    _check_conversion(original, converted)
    before, after = _manifests(original), _manifests(converted)
    weights = {name: _weight_errors(name, before[name].weights, after[name], bar) for name in before}
    not_run = _not_run(before, after, text, memory)
    on_text = acceptance = None
    if text is not None and "text" not in not_run:
        with bar("reading with both targets", len(text.samples), "samples") as advance:
            on_text = compare_on_text(original.target, converted.target, text.samples, text.dtype, advance)
    if text is not None and "acceptance" not in not_run:
        prompts = [ids[: len(ids) // 2] for ids in text.samples]
        pairs = (
            _decode(name, pair, prompts, text, bar) for name, pair in (("original", original), ("converted", converted))
        )
        acceptance = Acceptance(len(prompts), MAX_TOKENS, *pairs)
    return QualityReport(
        version=__version__,
        original={name: str(manifest.weights.path) for name, manifest in before.items()},
        converted={name: str(manifest.weights.path) for name, manifest in after.items()},
        weights=weights,
        dtype=_name(text.dtype) if text is not None and (on_text or acceptance) else None,
        text=on_text,
        acceptance=acceptance,
        not_run=not_run,
    )


def machine_memory() -> int:
    """Bytes that this machine has, used or not."""
    return memory_of(torch.device("cpu"))


def _check_conversion(original: Models, converted: Models) -> None:
    """Refuse models of which one was not made from the other, as far as their configs show it."""
    pairs: list[tuple[TargetCheckpoint | DrafterCheckpoint, TargetCheckpoint | DrafterCheckpoint]]
    pairs = [(original.target, converted.target)]
    if (original.drafter is None) != (converted.drafter is None):
        raise UserError(f"{converted.target.path}: original and converted must both have a drafter, or neither")
    if original.drafter is not None and converted.drafter is not None:
        check_pairing(original.target.config, original.target.path, original.drafter.config, original.drafter.path)
        pairs.append((original.drafter, converted.drafter))
    for before, after in pairs:
        if before.config.quantization is not None:
            raise UserError(f"{before.path}: is quantized itself; give the checkpoint that it was made from")
        for field in fields(before.config):
            was, is_ = getattr(before.config, field.name), getattr(after.config, field.name)
            if field.name != "quantization" and was != is_:
                raise UserError(
                    f"{after.path}: was not made from {before.path}: {field.name} is {is_} here and {was} there"
                )


def _manifests(models: Models) -> dict[str, Manifest]:
    found = {"target": target_manifest(models.target)}
    return found if models.drafter is None else {**found, "drafter": drafter_manifest(models.drafter)}


def _weight_errors(name: str, original: Weights, converted: Manifest, bar: Bar) -> WeightErrors:
    total = sum(layer_bytes(original, layer) for layer in converted.linears)
    with bar(f"comparing the weights of the {name}", total, "bytes") as advance:
        return weight_errors(original, converted, advance)


def _not_run(
    original: dict[str, Manifest], converted: dict[str, Manifest], text: HeldOutText | None, memory: int
) -> dict[str, str]:
    """Of `text` and `acceptance`, those that cannot be had, and why."""
    has_drafter = "drafter" in original
    found = {} if has_drafter else {"acceptance": "no drafter was converted"}
    if text is None:
        return dict.fromkeys(("text", "acceptance"), "no held-out text was given (--report_dataset)") | found
    targets = [original["target"], converted["target"]]
    needed = {"text": sum(_resident_bytes(target, text.dtype) for target in targets)}
    if has_drafter:
        pairs = (original, converted)
        needed["acceptance"] = max(sum(_resident_bytes(model, text.dtype) for model in pair.values()) for pair in pairs)
    which = {"text": "both targets", "acceptance": "a target and its drafter"}
    return found | {
        stage: f"the weights of {which[stage]} take {nbytes / 1e9:.2f} GB in {_name(text.dtype)}, this machine has "
        f"{memory / 1e9:.2f} GB of memory"
        for stage, nbytes in needed.items()
        if nbytes > memory
    }


def _resident_bytes(manifest: Manifest, dtype: torch.dtype) -> int:
    """What a model's weights take while it runs."""
    floats = sum(math.prod(shape) for shape in manifest.floats.values()) * dtype.itemsize
    kept = {**manifest.quantized, **manifest.others, **manifest.scales}
    return floats + sum(math.prod(shape) * manifest.weights.dtype(name).itemsize for name, shape in kept.items())


def _decode(name: str, pair: Models, prompts: Sequence[Sequence[int]], text: HeldOutText, bar: Bar) -> PairAcceptance:
    assert pair.drafter is not None
    with bar(f"decoding with the {name} pair", len(prompts), "samples") as advance:
        return measure_acceptance(pair.target, pair.drafter, prompts, text.tokenizer, MAX_TOKENS, text.dtype, advance)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
