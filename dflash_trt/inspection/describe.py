"""What a directory holds, told from configs, headers and scales without reading a weight."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.declaration import Declaration, read_declaration
from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint, open_drafter, open_target
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.target import CONFIG_FILE, TargetConfig
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.engine.directory import is_engine_config
from dflash_trt.errors import UserError, access
from dflash_trt.inspection.engine import describe_engine
from dflash_trt.inspection.links import links_outside
from dflash_trt.inspection.scale_values import Progress, nothing
from dflash_trt.inspection.survey import Survey, counted, survey
from dflash_trt.models.pair import drafter_manifest, target_manifest

PAIR = ("target", "drafter")
"""The checkpoints in a directory for `build --checkpoint_dir`."""


def describe(path: Path, progress: Progress = nothing) -> dict[str, Any]:
    """Kind, configuration, formats and sizes of any Hugging Face checkpoint, of a GGUF file or of an engine directory.

    `problems` has one line for each way in which it is not what it says it is. Of a checkpoint that cannot be built,
    `unsupported` says why; of a quantization that cannot be checked, `quantization` does. Of a directory that holds
    `target` and `drafter`, what each of them is. Of an engine also `cache_bytes`, what each rank takes beside its
    weights when it is loaded.

    Of a checkpoint whose files are links out of its directory, `links` names them by where they lead.

    Args:
        path: a directory, or a GGUF file.
        progress: told how many of how many scales, or engines, have been read.

    Raises:
        UserError: it is none of them, or its files are damaged.
    """
    with access(path, "read"):
        if not path.exists():
            raise UserError(f"{path}: no such file or directory")
        is_pair = not (path / CONFIG_FILE).exists() and all((path / part).is_dir() for part in PAIR)
    if is_pair:
        parts = {part: describe(path / part, progress) for part in PAIR}
        problems = [line for part in parts.values() for line in part.pop("problems")]
        return {"kind": "pair", **parts, "problems": problems}
    config = _config(path)
    if is_engine_config(config):
        return describe_engine(path, progress)
    if not config:
        return _describe_supported(open_target(path), Declaration(path), progress)
    links = links_outside(path)
    return {**_describe_checkpoint(path, config, progress), **({"links": links} if links else {})}


def _describe_checkpoint(path: Path, config: dict[str, Any], progress: Progress) -> dict[str, Any]:
    is_drafter = "dflash_config" in config or "speculators_model_type" in config
    declaration = read_declaration(path)
    try:
        (DrafterConfig if is_drafter else TargetConfig).from_pretrained(path)
    except UserError as refusal:
        return _describe_unsupported(path, config, declaration, str(refusal), progress)
    checkpoint = open_drafter(path) if is_drafter else open_target(path)
    return _describe_supported(checkpoint, declaration, progress)


def _describe_supported(
    checkpoint: TargetCheckpoint | DrafterCheckpoint, declaration: Declaration, progress: Progress
) -> dict[str, Any]:
    surveyed = survey(checkpoint.weights, declaration, progress)
    problems = list(surveyed.problems) or _misfits(checkpoint)
    config = {name: value for name, value in _plain(checkpoint.config).items() if name != "quantization"}
    kind = "target" if isinstance(checkpoint, TargetCheckpoint) else "DFlash drafter"
    return {"kind": kind, **config, **_told(surveyed, declaration), "problems": problems}


def _misfits(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> list[str]:
    """How the tensors are not those of the model that the config describes."""
    try:
        if isinstance(checkpoint, TargetCheckpoint):
            target_manifest(checkpoint)
        else:
            drafter_manifest(checkpoint)
    except UserError as refusal:
        return [str(refusal)]
    return []


def _describe_unsupported(
    path: Path, config: dict[str, Any], declaration: Declaration, reason: str, progress: Progress
) -> dict[str, Any]:
    surveyed = survey(SafetensorsWeights(path), declaration, progress)
    named = {name: config[name] for name in ("architectures", "model_type") if config.get(name) is not None}
    problems = list(surveyed.problems)
    return {"kind": "checkpoint", **named, "unsupported": reason, **_told(surveyed, declaration), "problems": problems}


def _told(surveyed: Survey, declaration: Declaration) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if declaration.unsupported is not None:
        told["quantization"] = {**declaration.stated, "unchecked": declaration.unsupported}
    elif declaration.quantization is not None:
        quantization = declaration.quantization
        algos = {"quant_algo": quantization.quant_algo, "kv_cache_quant_algo": quantization.kv_cache_quant_algo}
        told = {"quantization": algos, "excluded": {name: list(found) for name, found in surveyed.excluded.items()}}
    if surveyed.quantized.parameters:
        told["quantized_bits_per_parameter"] = surveyed.quantized.bits_per_parameter
    return {**told, **counted(surveyed.formats)}


def _plain(config: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if value is not None}


def _config(path: Path) -> dict[str, Any]:
    """Its config.json, where it is a directory that has one."""
    return dict(JsonObject.from_file(path / CONFIG_FILE).values) if is_file(path / CONFIG_FILE) else {}
