"""Weights that are hard on a codec, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

MAGNITUDES = ["normal", "tiny", "subnormal", "huge", "mixed", "ties", "sparse", "zeros"]


@st.composite
def weights(draw: st.DrawFn, block: int, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """A weight [out, in] with in % block == 0, of one of several kinds of values."""
    rows, blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(MAGNITUDES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (rows, blocks * block)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "ties":
        # Quotients of quarters: with an amax of 6 * 448 scales are integers, and many values lie between two codes.
        values = torch.randint(-24, 25, shape, generator=generator).double() / 4
        values *= 2.0 ** torch.randint(0, 9, (rows, blocks), generator=generator).repeat_interleave(block, 1)
        values[0, 0] = draw(st.sampled_from([2688.0, -2688.0]))
    elif kind == "mixed":
        values = normal * 2.0 ** torch.randint(-40, 1, (rows, blocks), generator=generator).repeat_interleave(block, 1)
    elif kind == "sparse":
        values = normal * (torch.rand(shape, generator=generator) < 0.05)
    else:
        factors = {"normal": 0.02, "tiny": 1e-30, "subnormal": 1e-41, "huge": 1e37, "zeros": 0.0}
        values = normal * factors[kind]
    dtype = draw(st.sampled_from(dtypes))
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
