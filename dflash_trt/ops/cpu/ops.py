"""The eager lowering on a CPU: torch, and our kernels where a pass of a few rows spends its time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.ops.base import LayerCache, Linear, RotaryTable, Span
from dflash_trt.ops.cpu.activation import swiglu
from dflash_trt.ops.cpu.attention import attention
from dflash_trt.ops.cpu.linear import linear as linear_kernel
from dflash_trt.ops.cpu.norm import rms_norm
from dflash_trt.ops.cpu.quantize import rounded_to_fp8, rounded_to_nvfp4
from dflash_trt.ops.cpu.rotary import rotary_embedding, write_cache
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.quantization.fp8 import FP8Tensor


@dataclass(frozen=True)
class Visibility:
    """Which keys rows see, as `Ops.attention_mask` is asked for it."""

    causal: bool
    window: int | None


class CPUOps(TorchOps):
    """`Ops` for float32, BF16 and float16 on a CPU, where a row's bits do not depend on other rows.

    Sums have a fixed order in float32; what else is done to rows are single operations, which round one way only. Where
    ranks divide a sum that leads to a rounding of activations, that is taken in float64, as `TorchOps` does.
    """

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        weight, input_scale = linear.weight, linear.input_scale
        if input_scale is not None and self.ranks.size > 1:
            return super().linear(x, linear)
        scale = None
        if input_scale is None:
            rows = x if x.dtype == torch.float32 else x.float()
        elif isinstance(weight, FP8Tensor):
            rows, scale = rounded_to_fp8(x, input_scale), input_scale
        else:
            rows = rounded_to_nvfp4(x, input_scale)
        y = linear_kernel(rows, weight, scale)
        if linear.bias is not None:
            y.add_(linear.bias)
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)

    def rotary_rows(self, table: RotaryTable, span: Span) -> RotaryTable:
        """Both [B, T, d / 2]."""
        return RotaryTable(table.cos[span.positions], table.sin[span.positions])

    def rotary_embedding(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        return rotary_embedding(x, rotary)

    def kv_cache_update(self, cache: LayerCache, keys: Tensor, values: Tensor, span: Span) -> LayerCache:
        write_cache(cache, keys, values, span)
        return cache

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> Visibility:  # type: ignore[override]
        return Visibility(causal, window)

    def attention(self, q: Tensor, cache: LayerCache, span: Span, mask: Visibility) -> Tensor:  # type: ignore[override]
        attended = attention(q.float(), cache, span, causal=mask.causal, window=mask.window)
        return attended if q.dtype == torch.float32 else attended.to(q.dtype)
