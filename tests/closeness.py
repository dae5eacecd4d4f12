"""How far results of one computation may lie apart on two makes of CPU: units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor


def last_places(count: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """`count` units in the last place of `dtype`, of values of about one or above, for `torch.testing.assert_close`.

    A function of a vector unit is right to a few of them, a sum to one for each doubling of its terms, and more where
    terms cancel: give a margin.
    """
    tolerance = count * torch.finfo(dtype).eps
    return {"rtol": tolerance, "atol": tolerance}


def close(value: Tensor, expected: Tensor, count: int = 8) -> bool:
    """Whether a tensor is what was computed in float64, in its own type, to `count` units in the last place."""
    wanted = expected.to(value.dtype) if expected.dtype == torch.float64 else expected
    if value.dtype != wanted.dtype or not value.is_floating_point():
        return value.equal(wanted)
    return torch.allclose(value, wanted, **last_places(count, value.dtype))
