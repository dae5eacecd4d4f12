"""Axes of one name have one size."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.errors import UserError
from dflash_trt.plugins.shapes import require_shapes


def test_what_fits_is_taken() -> None:
    require_shapes("op", x=(torch.zeros(2, 3), "A B"), y=(torch.zeros(3, 1, 2), "B 1 A"), z=(None, "A"))


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((3, 3), "A B", r"op: y has shape \(3, 3\), it must have \(2, 3\)"),
        ((2,), "A B", r"op: y has shape \(2,\), it must have \(2, 3\)"),
        ((2, 5, 1), "A C", r"op: y has shape \(2, 5, 1\), it must have \(2, C\)"),
        ((2,), "1", r"op: y has shape \(2,\), it must have \(1,\)"),
        ((4, 5), "C C", r"op: y has shape \(4, 5\), it must have \(4, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], axes: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        require_shapes("op", x=(torch.zeros(2, 3), "A B"), y=(torch.zeros(shape), axes))
