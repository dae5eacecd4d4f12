"""Numbers as a TensorRT network stores them: element types, rounding, 8- and 4-bit floats, and constants read back.

Independent of `dflash_trt.quantization` on purpose: the tables here are made from the definition of the formats.
A tensor of four-bit floats is held as its codes, one in each uint8.
"""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import tensorrt_rtx as trt
import torch
from torch import Tensor


class NetworkFault(Exception):
    """The network is wrong, its inputs are, or the interpreter does not know what a layer of it means."""


TORCH_TYPES: dict[trt.DataType, torch.dtype] = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.fp8: torch.float8_e4m3fn,
    trt.fp4: torch.uint8,
    trt.int8: torch.int8,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
    trt.bool: torch.bool,
}


def torch_type(dtype: trt.DataType) -> torch.dtype:
    """How this module holds a tensor of that type."""
    if dtype not in TORCH_TYPES:
        raise NetworkFault(f"no way to hold {dtype.name}; known: {', '.join(known.name for known in TORCH_TYPES)}")
    return TORCH_TYPES[dtype]


def _magnitudes(exponent_bits: int, mantissa_bits: int, count: int) -> Tensor:
    """The first `count` non-negative values of a small float, in the order of their codes (subnormals included)."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = [
        mantissa / steps * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / steps) * 2.0 ** (exponent - bias)
        for exponent, mantissa in itertools.product(range(2**exponent_bits), range(steps))
    ]
    return torch.tensor(values[:count], dtype=torch.float64)


E4M3 = _magnitudes(4, 3, 127)
"""0 to 448. The code after these, all ones, is NaN: the format has no infinity."""
E2M1 = _magnitudes(2, 1, 8)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def _nearest(x: Tensor, magnitudes: Tensor) -> Tensor:
    """Codes without sign of the nearest values; of two equally near ones the even code; past the end the last."""
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = x.abs().contiguous()
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    return torch.where(below % 2 == 0, below, above)


def encode_e4m3(x: Tensor) -> Tensor:
    """float64 to float8_e4m3fn: clipped to 448, to nearest, ties to even; NaN stays NaN."""
    codes = torch.where(x.isnan(), len(E4M3), _nearest(x, E4M3)) + 128 * torch.signbit(x)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e2m1(x: Tensor) -> Tensor:
    """float64 to codes of E2M1, one a byte: clipped to 6, to nearest, ties to even."""
    if x.isnan().any():
        raise NetworkFault("NaN has no four-bit float")
    return (_nearest(x, E2M1) + 8 * torch.signbit(x)).to(torch.uint8)


def encode_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)


def decode(x: Tensor, dtype: trt.DataType) -> Tensor:
    """The values of a tensor of any type that dequantization takes, as float64."""
    if dtype == trt.fp4:
        return torch.cat((E2M1, -E2M1))[x.long()]
    if dtype == trt.fp8:
        nan = torch.full((1,), torch.nan, dtype=torch.float64)
        return torch.cat((E4M3, nan, -E4M3, nan))[x.view(torch.uint8).long()]
    return x.double()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 rounded once, to nearest even. torch rounds twice on the way to bfloat16: to float32 first."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    single = x.float()
    inexact, outward = single.double() != x, single.double().abs() > x.abs()
    # Towards zero, with the last bit set where anything was lost: a tie stays one only where it is one.
    bits = (single.view(torch.int32) - outward.int()) | inexact.int()
    return bits.view(torch.float32).to(torch.bfloat16)


class _Weights(ctypes.Structure):
    """`nvinfer1::Weights`, as NvInferRuntimeBase.h declares it."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


_POINTER_IN_BINDING = 2 * ctypes.sizeof(ctypes.c_void_p)
"""A pybind11 object is Python's object header, then the address of the C++ object."""


def constant_values(layer: trt.IConstantLayer) -> Tensor:
    """What a constant layer holds, copied. The bindings show no bytes of types that NumPy lacks: those are looked up."""
    weights, shape = layer.weights, tuple(layer.shape)
    if isinstance(weights, np.ndarray):
        return torch.from_numpy(weights.copy()).reshape(shape)
    address = ctypes.c_void_p.from_address(id(weights) + _POINTER_IN_BINDING).value
    held = _Weights.from_address(address) if address else _Weights()
    if held.type != int(weights.dtype) or held.count != weights.size or not held.values:
        raise NetworkFault(f"the bytes of a {weights.dtype.name} constant are not where they were in TensorRT-RTX 1.7")
    packed = weights.dtype == trt.fp4
    size = held.count // 2 if packed else held.count * torch_type(weights.dtype).itemsize
    raw = torch.frombuffer(bytearray(ctypes.string_at(held.values, size)), dtype=torch.uint8)
    if packed:
        return torch.stack((raw & 15, raw >> 4), dim=-1).reshape(shape)
    return raw.view(torch_type(weights.dtype)).reshape(shape)


def wide(x: Tensor) -> Tensor:
    """Real numbers as float64; integers and booleans as they are."""
    return x.double() if x.is_floating_point() else x


def of_one_type(*tensors: Tensor | None) -> None:
    if len(types := {tensor.dtype for tensor in tensors if tensor is not None}) > 1:
        raise NetworkFault(f"inputs of different types: {sorted(map(str, types))}")


def of_one_rank(*tensors: Tensor) -> None:
    if len(ranks := {tensor.ndim for tensor in tensors}) > 1:
        raise NetworkFault(f"inputs of different ranks: {sorted(ranks)}")


def within(indices: Tensor, size: int) -> Tensor:
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < size):
        raise NetworkFault(f"indices from {int(indices.min())} to {int(indices.max())} into a dimension of {size}")
    return indices.long()
