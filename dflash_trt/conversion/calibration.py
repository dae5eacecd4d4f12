"""What a model was seen to compute on calibration samples: the magnitudes that activation scales are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt.checkpoint.gguf_weights import GGUFWeights
from dflash_trt.checkpoint.open_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.weights import finite_in
from dflash_trt.errors import UserError
from dflash_trt.models.weights import Manifest

Progress = Callable[[int], None]
"""Told of every sample, with 1, when the model has seen it."""


@dataclass(frozen=True)
class Calibration:
    """Largest magnitudes over all calibration tokens, each positive and finite, a float32 value held as a float."""

    inputs: dict[str, float]
    """By linear layer, `model.layers.0.mlp.up_proj` for one: of its input."""
    keys: dict[str, float]
    """By attention module, `model.layers.0.self_attn` for one: of its keys as they are cached, rotated."""
    values: dict[str, float]
    """As `keys`, of its values."""
    method: str
    """What ran, in which type, over how much: a line for users."""


def calibration_dtype(target: TargetCheckpoint) -> torch.dtype:
    """The type to calibrate in: the target checkpoint's own; float32 for a GGUF file, whose weights are unpacked.

    Raises:
        UserError: the checkpoint's matrices have several types, or are quantized.
    """
    if isinstance(target.weights, GGUFWeights):
        return torch.float32
    weights = target.weights
    dtypes = {weights.dtype(name) for name in weights.names() if len(weights.shape(name)) == 2}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise UserError(
            f"{target.path}: its matrices are {names}, so it has no type of its own to calibrate in; convert it with "
            "--qformat bf16 first, and what comes of that again"
        )
    return dtypes.pop()


def checked_amax(amax: Mapping[str, torch.Tensor | None], what: str, path: Path) -> dict[str, float]:
    """Largest magnitudes by module, all of which a scale can be made from.

    Args:
        amax: a scalar of any floating type for each module, None for one that no token reached.
        what: `input`, `keys` or `values`, for the message.
        path: the checkpoint, for the message.

    Raises:
        UserError: naming a module that no token reached, or whose largest magnitude is zero or not finite.
    """
    found = {}
    for name, value in amax.items():
        if value is None:
            raise UserError(f"{path}: no calibration token reached {name}; calibrate with more and longer samples")
        found[name] = float(value)
        if not 0 < found[name] < float("inf"):
            raise UserError(
                f"{path}: the largest magnitude of the {what} of {name} is {found[name]:g}, which no scale can be made "
                "from; calibrate with other samples, or leave the module unquantized"
            )
    return found


def not_finite(path: Path, what: str, dtype: torch.dtype) -> UserError:
    """The refusal of a checkpoint whose activations, `the input of fc` for one, its type cannot hold."""
    return UserError(
        f"{path}: {what} became infinite or not a number in {str(dtype).removeprefix('torch.')}; the checkpoint is "
        "damaged, or needs a wider type"
    )


def finite_weights(manifest: Manifest, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's unquantized tensors by name, in `dtype`, all of them finite: else nothing that is run means anything.

    Raises:
        UserError: naming the tensor that is not, or that `dtype` cannot hold.
    """
    for name in manifest.floats:
        where = f"{manifest.weights.file_of(name)}: {name}"
        yield name, finite_in(manifest.weights.read(name), dtype, where)


def describe(method: str, dtype: torch.dtype, samples: list[list[int]]) -> str:
    """`method` with the type and the amount of what it ran over."""
    tokens = sum(map(len, samples))
    return f"{method} in {str(dtype).removeprefix('torch.')} over {len(samples)} samples of {tokens} tokens in all"
