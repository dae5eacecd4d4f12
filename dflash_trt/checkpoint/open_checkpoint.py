"""Opening a target or a drafter: config and weights, seen to fit each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.gguf_config import target_config
from dflash_trt.checkpoint.gguf_file import GGUFFile, find_gguf
from dflash_trt.checkpoint.gguf_weights import GGUFWeights
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.tensors import (
    check_tensors,
    drafter_tensors,
    optional_drafter_tensors,
    target_tensors,
)
from dflash_trt.checkpoint.weights import SafetensorsWeights, Weights
from dflash_trt.errors import UserError


@dataclass(frozen=True)
class TargetCheckpoint:
    """A target on disk.

    Attributes:
        path: the Hugging Face directory or the GGUF file.
        config: what it is.
        weights: its tensors. `lm_head.weight` may be among them though the config ties it to the embedding;
            it is then a copy of the embedding.
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

    @property
    def own_embedding(self) -> bool:
        """The checkpoint holds `embed_tokens.weight`; else the target's embedding is borrowed."""
        return "embed_tokens.weight" in self.weights

    @property
    def own_head(self) -> bool:
        """The checkpoint holds `lm_head.weight`; else the target's head is borrowed."""
        return "lm_head.weight" in self.weights


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
    copies = {"lm_head.weight": (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
    check_tensors(path, weights, target_tensors(config), copies)
    return TargetCheckpoint(path, config, weights)


def open_drafter(path: str | Path) -> DrafterCheckpoint:
    """Open a drafter's directory, in the z-lab or the speculators format.

    Raises:
        UserError: the checkpoint is incomplete or not supported.
    """
    path = Path(path)
    config, weights = DrafterConfig.from_pretrained(path), SafetensorsWeights(path)
    check_tensors(path, weights, drafter_tensors(config), optional_drafter_tensors(config))
    if "d2t" in weights:
        _check_vocabulary_map(weights, config.vocab_size)
    return DrafterCheckpoint(path, config, weights)


def _check_vocabulary_map(weights: Weights, vocab_size: int) -> None:
    """Offsets, so that draft id i is target id i + d2t[i]: each inside the vocabulary, none of them twice."""
    offsets = weights.read("d2t").to(torch.int64)
    targets = torch.arange(len(offsets)) + offsets
    outside = targets[(targets < 0) | (targets >= vocab_size)]
    if len(outside):
        raise UserError(
            f"{weights.file_of('d2t')}: d2t maps a draft id to {int(outside[0])}, outside a vocabulary of "
            f"{vocab_size}; it must hold offsets to the draft ids"
        )
    if len(set(targets.tolist())) != len(targets):
        raise UserError(f"{weights.file_of('d2t')}: d2t maps two draft ids to one token")
