"""What Triton's interpreter gets wrong about types, put right with torch's conversions.

Its conversion to bfloat16 truncates, and its dot product multiplies bfloat16's bits as integers (Triton 3.7.1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_FLOATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_cast_of_triton = InterpreterBuilder.cast_impl


def cast(builder: Any, source: Any, target: Any, rounding: Any = None) -> Any:
    """The builder's `cast_impl` and `create_fp_to_fp`: between floats to nearest, ties to even."""
    if source.dtype.scalar not in _FLOATS or target.scalar not in _FLOATS:
        return _cast_of_triton(builder, source, target)
    return TensorHandle(_numpy(_tensor(source).to(_FLOATS[target.scalar])), target.scalar)


def dot(builder: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    """The builder's `create_dot`: a @ b + total, summed in total's type."""
    wide = _FLOATS[total.dtype.scalar]
    return TensorHandle(_numpy(_tensor(a).to(wide) @ _tensor(b).to(wide) + _tensor(total)), total.dtype.scalar)


def _tensor(handle: Any) -> Tensor:
    """bfloat16 and FP8 are held as unsigned integers."""
    return torch.from_numpy(np.ascontiguousarray(handle.data)).view(_FLOATS[handle.dtype.scalar])


def _numpy(tensor: Tensor) -> Any:
    held = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(held.get(tensor.dtype, tensor.dtype)).numpy()
