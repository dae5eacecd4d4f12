"""Tensors that a build leaves out because others stand for them, seen to be copies of those."""

from __future__ import annotations

import torch

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.errors import UserError
from dflash_trt.models.dflash import copies_of_target
from dflash_trt.models.llama import EMBEDDING, HEAD

_EMBEDDING, _HEAD = f"{EMBEDDING}.weight", f"{HEAD}.weight"


def check_copies(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """What is left out because another tensor stands for it must equal that: a tensor of its own would be lost.

    Raises:
        UserError: naming one that differs.
    """
    tied = target.config.tie_word_embeddings
    if tied and _HEAD in target.weights:
        _check_copy(
            target.weights,
            _HEAD,
            target.weights,
            _EMBEDDING,
            "which the config's tie_word_embeddings says it is; set that to false, or remove the tensor",
        )
    for name, original in copies_of_target(drafter.config).items():
        if name in drafter.weights:
            _check_copy(
                drafter.weights,
                name,
                target.weights,
                _EMBEDDING if tied and original == _HEAD else original,
                "which the drafter reads instead; give the target that the drafter was made for, unquantized",
            )


def _check_copy(weights: Weights, name: str, others: Weights, original: str, why: str) -> None:
    """Equal byte by byte once both have the copy's type, which may be a narrower one."""
    same = weights.shape(name) == others.shape(original) and torch.equal(
        weights.read(name).view(torch.uint8), others.read(original).to(weights.dtype(name)).view(torch.uint8)
    )
    if not same:
        whose = "" if weights is others else f" of {others.file_of(original)}"
        raise UserError(f"{weights.file_of(name)}: {name} is not a copy of {original}{whose}, {why}")
