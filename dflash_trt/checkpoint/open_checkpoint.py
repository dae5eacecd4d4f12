"""Opening a target or a drafter: its config and its weights, each read but not yet seen to fit the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.gguf_config import target_config
from dflash_trt.checkpoint.gguf_file import GGUFFile, find_gguf
from dflash_trt.checkpoint.gguf_weights import GGUFWeights
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.weights import INDEX_DTYPES, SafetensorsWeights, Weights
from dflash_trt.errors import UserError


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target on disk.

    Attributes:
        path: the Hugging Face directory or the GGUF file.
        config: what it is.
        weights: its tensors.
    """

    path: Path
    config: TargetConfig
    weights: Weights


@dataclass(frozen=True)
class DrafterCheckpoint:
    """A drafter on disk.

    Attributes:
        path: its directory.
        config: what it is.
        weights: its tensors; those of the layers, `fc`, `hidden_norm` and `norm` have the same names in both
            formats.
    """

    path: Path
    config: DrafterConfig
    weights: Weights


def open_target(path: str | Path) -> TargetCheckpoint:
    """Open a Hugging Face directory, a GGUF file, or a directory that holds exactly one GGUF file.

    Raises:
        UserError: the checkpoint is incomplete or not supported.
    """
    path = Path(path)
    gguf_path = find_gguf(path)
    weights: Weights
    if gguf_path is None:
        config, weights = TargetConfig.from_pretrained(path), SafetensorsWeights(path)
    else:
        path, file = gguf_path, GGUFFile(gguf_path)
        config, weights = target_config(file), GGUFWeights(file)
    return TargetCheckpoint(path, config, weights)


def open_drafter(path: str | Path) -> DrafterCheckpoint:
    """Open a drafter's directory, in the z-lab or the speculators format.

    Raises:
        UserError: the checkpoint is incomplete or not supported.
    """
    path = Path(path)
    config, weights = DrafterConfig.from_pretrained(path), SafetensorsWeights(path)
    if config.has_reduced_vocabulary:
        _check_vocabulary_map(weights, config)
    return DrafterCheckpoint(path, config, weights)


def _check_vocabulary_map(weights: Weights, config: DrafterConfig) -> None:
    """Offsets, so that draft id i is target id i + d2t[i]: each inside the vocabulary, none of them twice.

    A map that is missing or has another shape or type is left to the model, which refuses it as any other tensor.
    """
    if "d2t" not in weights or weights.shape("d2t") != (config.draft_vocab_size,):
        return
    offsets = weights.read("d2t")
    if offsets.dtype not in INDEX_DTYPES:
        return
    targets = torch.arange(len(offsets)) + offsets
    outside = targets[(targets < 0) | (targets >= config.vocab_size)]
    if len(outside):
        raise UserError(
            f"{weights.file_of('d2t')}: d2t maps a draft id to {int(outside[0])}, outside a vocabulary of "
            f"{config.vocab_size}; it must hold offsets to the draft ids"
        )
    if len(set(targets.tolist())) != len(targets):
        raise UserError(f"{weights.file_of('d2t')}: d2t maps two draft ids to one token")
