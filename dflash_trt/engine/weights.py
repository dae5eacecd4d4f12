"""The weights of an engine directory, seen to be those of its config."""

from __future__ import annotations

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.engine.directory import Engine
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest


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
    return target, drafter


def _check_type(manifest: Manifest, dtype: str) -> None:
    weights = manifest.weights
    for name in manifest.floats:
        found = str(weights.dtype(name)).removeprefix("torch.")
        if found != dtype:
            raise UserError(
                f"{weights.file_of(name)}: {name} is {found}, the engine's config says {dtype}; build it again"
            )
