"""The largest magnitudes, of a tensor and of its blocks, from which all scales are made.

Weights that no scale can be made for are refused here, by name.
"""

from __future__ import annotations

import torch

from dflash_trt.errors import UserError

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_amax(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The largest magnitude of a weight, as a float32 scalar.

    Args:
        weight: floating-point, any shape, not empty.
        name: the tensor's name, for the message.

    Raises:
        UserError: the weight has an infinity or a NaN.
    """
    low, high = torch.aminmax(weight)
    amax = torch.maximum(-low, high).float()
    if not torch.isfinite(amax):
        broken = int((~torch.isfinite(weight)).sum())
        raise UserError(
            f"tensor {name}: {broken} of its {weight.numel()} values are infinite or not a number, "
            "which cannot be quantized"
        )
    return amax


def block_amax(blocks: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each block: floating-point [..., size] to float32 [...]."""
    # Floats without a sign order as the integers that their bits spell, whose maximum is twice as fast.
    magnitudes = blocks.abs()
    largest = magnitudes.view(_INTEGERS[magnitudes.itemsize]).amax(dim=-1)
    return largest.view(magnitudes.dtype).float()


def refuse_uneven(weight: torch.Tensor, block: int, name: str) -> None:
    """Refuse a weight whose last dimension is no multiple of `block`.

    Raises:
        UserError: naming the tensor, the dimension and the block.
    """
    if weight.shape[-1] % block:
        raise UserError(
            f"tensor {name}: its last dimension, {weight.shape[-1]} of {list(weight.shape)}, is not a "
            f"multiple of {block}, the number of values that share a scale; leave it unquantized"
        )
