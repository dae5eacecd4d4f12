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
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.quantization.fp8 import FP8Tensor, encode_fp8
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, fake_quantize_nvfp4


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
        rows, scale = x.reshape(-1, x.shape[-1]).float(), None
        if isinstance(weight, FP8Tensor) and input_scale is not None:
            rows, scale = encode_fp8(rows, input_scale).float(), input_scale
        elif isinstance(weight, NVFP4Tensor) and input_scale is not None:
            rows = fake_quantize_nvfp4(rows, input_scale)
        y = linear_kernel(rows.contiguous(), weight, scale)
        y = y if linear.bias is None else y.add_(linear.bias)
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)

    def rotary_embedding(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        # A fused operation rounds once or twice, as its vectors happen to lie.
        return (x * rotary.cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(rotary.sin))

    def attention_mask(self, span: Span, *, causal: bool, window: int | None) -> Visibility:  # type: ignore[override]
        return Visibility(causal, window)

    def attention(self, q: Tensor, cache: LayerCache, span: Span, mask: Visibility) -> Tensor:  # type: ignore[override]
        return attention(q.float(), cache, span, causal=mask.causal, window=mask.window).to(q.dtype)
