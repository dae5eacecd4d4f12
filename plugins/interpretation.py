"""Triton's interpreter beside its compiler in one process, and with torch's conversions.

Its own conversion to bfloat16 truncates, and its dot product multiplies bfloat16's bits as integers (Triton 3.7.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

_FLOATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_cast_of_triton = InterpreterBuilder.cast_impl


def interpret(function: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Run a function that `triton.jit` decorated on tensors of the CPU, one thread block after the other."""
    with _interpreting():
        interpreter.InterpretedFunction(function.fn)[grid](*arguments, **constants)


@contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's language on NumPy, until the block ends.

    Triton interprets functions that were decorated under TRITON_INTERPRET, its own library's among them, and those can
    never be compiled. Here they are all decorated for compilation, and while a kernel is interpreted, each that it
    calls is interpreted too.
    """
    everywhere = type("Language", (), {"__globals__": {"tl": triton.language, "core": triton.language.core}})
    scope = interpreter._patch_lang(everywhere)
    interpreted: dict[Any, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in interpreted:
            interpreted[self.fn] = interpreter.InterpretedFunction(self.fn).rewrite()
        return interpreted[self.fn](*args, **kwargs)

    scope.set_attr(JITFunction, "__call__", call)
    scope.set_attr(triton.knobs.runtime, "interpret", True)
    scope.set_attr(InterpreterBuilder, "cast_impl", cast)
    scope.set_attr(InterpreterBuilder, "create_fp_to_fp", cast)
    scope.set_attr(InterpreterBuilder, "create_dot", dot)
    try:
        yield
    finally:
        scope.restore()


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
