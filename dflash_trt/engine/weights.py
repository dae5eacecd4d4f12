"""The weights of an engine directory, seen to be those of its config."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.engine.directory import Engine
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest

DAMAGED = "the checkpoint is damaged"
_UNREACHED = "a linear that no calibration token reached has such an input_scale; calibrate with more text"
_E4M3_NAN = 0x7F
"""All bits but the sign; codes above it are negative."""


def open_weights(engine: Engine) -> tuple[SafetensorsWeights, SafetensorsWeights]:
    """Target's and drafter's weights, opened by their headers.

    Raises:
        UserError: a file is damaged, or its tensors are not those that the engine's config describes.
    """
    target, drafter = SafetensorsWeights(engine.target_weights), SafetensorsWeights(engine.drafter_weights)
    manifests = (
        target_manifest(TargetCheckpoint(engine.path, engine.config.pretrained_config, target)),
        drafter_manifest(DrafterCheckpoint(engine.path, engine.config.speculative_config, drafter)),
    )
    for manifest in manifests:
        _check_type(manifest, engine.config.build_config.dtype)
        check_scales(manifest)
    return target, drafter


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
