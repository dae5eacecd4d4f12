"""The activation of gated feed-forward layers."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dflash_trt.ops.cpu.formats import FLOATS
from dflash_trt.ops.cpu.kernel import F32, Emitter, Kernel, Value, compiled
from dflash_trt.ops.cpu.vector import WIDTH, exp, splat, tail_mask

_COUNT, _GATE, _UP, _OUT = range(2, 6)
_UNIT = 1 << 12
"""Numbers that a thread takes at once."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in float32 and rounded once; any shape, both of one type."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count = gate.numel()
    threads = 1 if count <= 2 * _UNIT else torch.get_num_threads()
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

    with e.units(e.i64(_UNIT), e.argument(_COUNT)) as (first, end):
        left = e.b.and_(e.b.sub(end, first), e.i64(WIDTH - 1))
        whole = e.b.sub(end, left)
        with e.loop(first, whole, e.i64(WIDTH)) as start:
            write(start, None)
        with e.b.if_then(e.b.icmp_signed(">", left, e.i64(0))):
            write(whole, tail_mask(e, left))
