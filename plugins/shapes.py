"""Whether tensors fit each other: a kernel reads wherever its sizes point."""

from __future__ import annotations

from torch import Tensor

from dflash_trt.errors import UserError


def require_shapes(op: str, **tensors: tuple[Tensor | None, str]) -> None:
    """See that axes of one name have one size.

    Args:
        op: what takes the tensors.
        tensors: by name each, if there is one, and its axes: names that its shape is the first to give a size, or that
            one before gave it, and numbers. "B T 1" is such a list.

    Raises:
        UserError: a tensor has another shape.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in tensors.items():
        if tensor is None:
            continue
        names, shape = axes.split(), tuple(tensor.shape)
        if len(names) == len(shape):
            for axis, size in zip(names, shape, strict=True):
                sizes.setdefault(axis, int(axis) if axis.isdigit() else size)
        wanted = tuple(sizes.get(axis, axis) for axis in names)
        if shape != wanted:
            raise UserError(f"{op}: {name} has shape {shape}, it must have {wanted}".replace("'", ""))
