"""Linear layers of a network, in every format: packed weights stay packed constants."""

from __future__ import annotations

import torch

from dflash_trt.ops.base import Linear
from dflash_trt.ops.tensorrt_layers import Layers, NetworkTensor
from dflash_trt.quantization.fp8 import FP8Tensor
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK, NVFP4Tensor


def network_linear(layers: Layers, x: NetworkTensor, linear: Linear) -> NetworkTensor:
    """x [B, T, in] -> [B, T, out].

    Where activations are quantized, both operands of the product come out of a dequantization, which is how TensorRT
    knows that it may multiply the codes.
    """
    weight = linear.weight
    if isinstance(weight, FP8Tensor):
        product = _fp8(layers, x, weight, linear.input_scale)
    elif isinstance(weight, NVFP4Tensor):
        product = _nvfp4(layers, x, weight, linear.input_scale)
    else:
        product = layers.matmul_transposed(x, _matrix(layers, weight))
    return product if linear.bias is None else layers.add(product, layers.constant(linear.bias.view(1, 1, -1)))


def _matrix(layers: Layers, weight: torch.Tensor | NetworkTensor) -> NetworkTensor:
    if isinstance(weight, torch.Tensor):
        return layers.constant(weight[None])
    return layers.shuffle(weight, (1, *weight.shape))


def _fp8(layers: Layers, x: NetworkTensor, weight: FP8Tensor, input_scale: torch.Tensor | None) -> NetworkTensor:
    if input_scale is not None:
        scale = layers.constant(input_scale)
        x = layers.cast(layers.dequantize(layers.quantize(layers.wide(x), scale), scale, layers.trt.float32), x.dtype)
    decoded = layers.dequantize(
        layers.constant(weight.weight[None]), layers.constant(weight.weight_scale), layers.trt.float32
    )
    return layers.matmul_transposed(x, layers.cast(decoded, x.dtype))


def _nvfp4(layers: Layers, x: NetworkTensor, weight: NVFP4Tensor, input_scale: torch.Tensor | None) -> NetworkTensor:
    if input_scale is not None:
        scale = layers.constant(input_scale)
        codes, scales = layers.quantize_blocks(x, scale, NVFP4_BLOCK)
        x = layers.cast(_decoded(layers, codes, scales, scale), x.dtype)
    decoded = _decoded(
        layers,
        layers.packed_constant(weight.weight[None]),
        layers.constant(weight.weight_scale[None]),
        layers.constant(weight.weight_scale_2),
    )
    return layers.matmul_transposed(x, layers.cast(decoded, x.dtype))


def _decoded(layers: Layers, codes: NetworkTensor, scales: NetworkTensor, scale: NetworkTensor) -> NetworkTensor:
    """Float32: codes times the scales of their blocks, which are in units of `scale`."""
    return layers.dequantize(codes, layers.dequantize(scales, scale, layers.trt.float32), layers.trt.float32)
