"""The weights of an engine directory, seen to be those of its config."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.engine.config import EngineConfig
from dflash_trt.engine.directory import Engine, rank_files
from dflash_trt.errors import UserError
from dflash_trt.models.pair import Pair, drafter_manifest, load_pair, target_manifest
from dflash_trt.models.weights import Manifest

DAMAGED = "the checkpoint is damaged"
BUILD_ID = "build_id"
"""In the header of every weight file, and in config.json."""
_UNREACHED = "a linear that no calibration token reached has such an input_scale; calibrate with more text"
_E4M3_NAN = 0x7F
"""All bits but the sign; codes above it are negative."""


def open_weights(engine: Engine, rank: int = 0) -> tuple[SafetensorsWeights, SafetensorsWeights]:
    """A rank's weights of target and drafter, opened by their headers.

    Raises:
        UserError: a file is damaged or of another build, or its tensors are not those of the engine's config.
    """
    return _open_rank(engine.config, engine.path, rank)


def load_rank(config: EngineConfig, directory: Path, rank: int, device: torch.device) -> Pair:
    """A rank's part of both models, ready to run or to be recorded; on a CPU its weights stay mapped.

    Args:
        directory: an engine of the torch backend, or the parts that engines are built of.

    Raises:
        UserError: as `open_weights`.
    """
    target, drafter = _open_rank(config, directory, rank)
    return load_pair(
        TargetCheckpoint(directory, config.pretrained_config, target),
        DrafterCheckpoint(directory, config.speculative_config, drafter),
        positions=config.positions,
        dtype=config.build_config.torch_dtype,
        device=device,
        ranks=config.build_config.tp_size,
    )


def check_rank_files(engine: Engine) -> None:
    """Refuse an engine that lacks the file of a rank, or has one of another build.

    Raises:
        UserError: naming the file.
    """
    for rank in range(engine.config.build_config.tp_size):
        for file in engine.rank_files(rank):
            _of_this_build(engine.config, file)


def _open_rank(config: EngineConfig, directory: Path, rank: int) -> tuple[SafetensorsWeights, SafetensorsWeights]:
    target, drafter = (_of_this_build(config, file) for file in rank_files(directory, rank))
    ranks = config.build_config.tp_size
    manifests = (
        target_manifest(TargetCheckpoint(directory, config.pretrained_config, target), ranks),
        drafter_manifest(DrafterCheckpoint(directory, config.speculative_config, drafter), ranks),
    )
    for manifest in manifests:
        _check_type(manifest, config.build_config.dtype)
        check_scales(manifest)
    return target, drafter


def _of_this_build(config: EngineConfig, file: Path) -> SafetensorsWeights:
    ranks = config.build_config.tp_size
    if not is_file(file):
        files = "rank0.safetensors" if ranks == 1 else f"rank0.safetensors to rank{ranks - 1}.safetensors"
        raise UserError(f"{file}: is missing; tp_size is {ranks} in {CONFIG_FILE}, so {file.parent} must hold {files}")
    weights = SafetensorsWeights(file)
    found, expected = weights.metadata().get(BUILD_ID), config.build_id
    if found != expected:
        raise UserError(
            f"{file}: is of another build: its {BUILD_ID} is {found}, {CONFIG_FILE} says {expected}; build the engine "
            "again"
        )
    return weights


def check_scales(manifest: Manifest) -> None:
    """Refuse scalar scales that are none: they would turn some prompts, and those only, into infinity or NaN.

    Raises:
        UserError: one is zero, negative or not finite.
    """
    for name in manifest.scales:
        value = manifest.weights.read(name).item()
        if not 0 < value < float("inf"):
            why = _UNREACHED if name.endswith(".input_scale") else DAMAGED
            raise UserError(
                f"{manifest.weights.file_of(name)}: {name} is {value}, it must be positive and finite: {why}"
            )


def check_packed(name: str, tensor: torch.Tensor, file: Path) -> None:
    """Refuse e4m3 codes that no quantization makes: NaN in a weight; NaN, zero or a sign in the scale of a block.

    An encoder gives a block of zeros the scale 1, and other blocks 2^-9 or more.

    Args:
        name: of a packed weight or of its block scales.
        tensor: what it holds.
        file: where, for the message.

    Raises:
        UserError: naming the tensor, and how many such codes it holds.
    """
    if tensor.dtype != torch.float8_e4m3fn:
        return  # every byte is two e2m1 values
    codes = tensor.view(torch.uint8)
    scales = name.endswith(".weight_scale")
    broken = (codes == 0) | (codes >= _E4M3_NAN) if scales else (codes & _E4M3_NAN) == _E4M3_NAN
    if bool(broken.any()):
        what = "scales that are zero, negative or NaN" if scales else "values that are NaN"
        raise UserError(f"{file}: {name} holds {int(broken.sum())} {what}; {DAMAGED}")


def _check_type(manifest: Manifest, dtype: str) -> None:
    weights = manifest.weights
    for name in manifest.floats:
        found = str(weights.dtype(name)).removeprefix("torch.")
        if found != dtype:
            raise UserError(
                f"{weights.file_of(name)}: {name} is {found}, the engine's config says {dtype}; build it again"
            )
