"""The activation of gated feed-forward layers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.cpu.formats import FLOATS
from dflash_trt.ops.cpu.kernel import F32, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import elementwise, exp, splat

_COUNT, _GATE, _UP, _OUT = range(2, 6)
_SMALL = 1 << 13
"""Numbers that one thread is done with before another one is awake."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in float32 and rounded once; any shape, both of one type."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    threads = 1 if count < _SMALL else torch.get_num_threads()
    _kernel(gate.dtype)(threads, count, gate.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    return compiled(lambda e: _write(e, dtype), f"swiglu_{dtype}".replace("torch.", ""))


def _write(e: Emitter, dtype: torch.dtype) -> None:
    gate, up, out = (FLOATS[dtype](e.pointer(index)) for index in (_GATE, _UP, _OUT))

    def write(start: Value, mask: Value | None) -> None:
        g, one = gate.read(e, start, mask), splat(e, F32(1.0))
        silu = e.b.fdiv(g, e.b.fadd(one, exp(e, e.b.fneg(g))))
        out.write(e, start, e.b.fmul(silu, up.read(e, start, mask)), mask)

    elementwise(e, e.argument(_COUNT), write)
