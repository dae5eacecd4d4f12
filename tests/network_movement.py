"""What TensorRT's layers that move numbers and never compute them mean. See tests/network_arithmetic.py for the rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorrt_rtx as trt
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.network_formats import NetworkFault, constant_values, of_one_rank, of_one_type, torch_type, within


def constant(layer: trt.IConstantLayer) -> Tensor:
    return constant_values(layer)


def identity(layer: trt.IIdentityLayer, x: Tensor) -> Tensor:
    return x


def cast(layer: trt.ICastLayer, x: Tensor) -> Tensor:
    """To an integer towards zero, to a boolean whether it is other than zero."""
    to_type = torch_type(layer.to_type)
    if trt.fp8 in (layer.to_type, layer.get_input(0).dtype) or trt.fp4 in (layer.to_type, layer.get_input(0).dtype):
        raise NetworkFault("8- and 4-bit floats are not cast but quantized")
    return x.double() if to_type.is_floating_point else x.to(to_type)


def shuffle(layer: trt.IShuffleLayer, x: Tensor, dims: Tensor | None = None) -> Tensor:
    x = x.permute(list(layer.first_transpose)[: x.ndim])
    shape = layer.reshape_dims if dims is None else dims.tolist()
    if shape is not None:
        x = x.reshape([x.shape[i] if n == 0 and layer.zero_is_placeholder else n for i, n in enumerate(shape)])
    return x.permute(list(layer.second_transpose)[: x.ndim])


def shape(layer: trt.IShapeLayer, x: Tensor) -> Tensor:
    return torch.tensor(x.shape, dtype=torch.int64)


def squeeze(layer: trt.ISqueezeLayer, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = [axis for axis, n in enumerate(x.shape) if n == 1] if axes is None else axes.tolist()
    if any(x.shape[axis] != 1 for axis in chosen):
        raise NetworkFault(f"axes {chosen} are not all of size 1")
    return x.squeeze(tuple(chosen))


def unsqueeze(layer: trt.IUnsqueezeLayer, x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axis % (x.ndim + axes.numel()) for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def slice_(layer: trt.ISliceLayer, x: Tensor, *dynamic: Tensor | None) -> Tensor:
    start, size, stride, fill, axes = [*dynamic, *[None] * (5 - len(dynamic))]
    starts, sizes, strides = (
        list(static) if given is None else given.tolist()
        for static, given in ((layer.start, start), (layer.shape, size), (layer.stride, stride))
    )
    chosen = axes.tolist() if axes is not None else layer.axes
    chosen = list(range(x.ndim) if chosen is None else chosen)
    if not len(chosen) == len(starts) == len(sizes) == len(strides):
        raise NetworkFault(f"start {starts}, size {sizes}, stride {strides} for axes {chosen}")
    outside = torch.zeros([1] * x.ndim, dtype=torch.bool)
    for axis, first, count, step in zip(chosen, starts, sizes, strides, strict=True):
        index = torch.arange(count) * step + first
        sampled = _sampled(layer.mode, index, x.shape[axis])
        beyond = (index < 0) | (index >= x.shape[axis]) if layer.mode == trt.SampleMode.FILL else index != index
        x = x.index_select(axis, sampled)
        outside = outside | beyond.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
    if not outside.any():
        return x
    if fill is None:
        raise NetworkFault("no value to fill with")
    of_one_type(x, fill)
    return torch.where(outside, fill, x)


def _sampled(mode: trt.SampleMode, index: Tensor, size: int) -> Tensor:
    if mode == trt.SampleMode.STRICT_BOUNDS:
        return within(index, size)
    if mode == trt.SampleMode.WRAP:
        return index % size
    if mode in (trt.SampleMode.CLAMP, trt.SampleMode.FILL):
        return index.clamp(0, size - 1)
    turned = index.abs() % max(2 * size - 2, 1)
    return torch.where(turned >= size, 2 * size - 2 - turned, turned)


def concatenation(layer: trt.IConcatenationLayer, *parts: Tensor) -> Tensor:
    of_one_type(*parts)
    return torch.cat(parts, dim=layer.axis)


def gather(layer: trt.IGatherLayer, data: Tensor, indices: Tensor) -> Tensor:
    """ONNX's Gather, GatherElements and GatherND; the leading dimensions that both share are handled one by one."""
    if layer.mode == trt.GatherMode.ELEMENT:
        return data.gather(layer.axis, within(indices, data.shape[layer.axis]))
    shared = layer.num_elementwise_dims
    if shared:
        pairs = zip(data.flatten(0, shared - 1), indices.flatten(0, shared - 1), strict=True)
        parts = [_gathered(layer.mode, part, index, layer.axis - shared) for part, index in pairs]
        return torch.stack(parts).unflatten(0, data.shape[:shared])
    return _gathered(layer.mode, data, indices, layer.axis)


def _gathered(mode: trt.GatherMode, data: Tensor, indices: Tensor, axis: int) -> Tensor:
    if mode == trt.GatherMode.ND:
        return data[_points(indices, data.shape)]
    found = data.index_select(axis, within(indices, data.shape[axis]).flatten())
    return found.reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])


def _points(indices: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(within(index, size) for index, size in zip(indices.unbind(-1), shape, strict=False))


def scatter(layer: trt.IScatterLayer, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    of_one_type(data, updates)
    if layer.mode == trt.ScatterMode.ELEMENT:
        return data.scatter(layer.axis, within(indices, data.shape[layer.axis]), updates)
    return data.index_put(_points(indices, data.shape), updates)


def select(layer: trt.ISelectLayer, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    of_one_type(a, b)
    of_one_rank(condition, a, b)
    return torch.where(condition, a, b)


def one_hot(layer: trt.IOneHotLayer, indices: Tensor, values: Tensor, depth: Tensor) -> Tensor:
    off, on = values.unbind()
    return torch.where(F.one_hot(within(indices, int(depth)), int(depth)).bool(), on, off).movedim(-1, layer.axis)


def non_zero(layer: trt.INonZeroLayer, x: Tensor) -> Tensor:
    return x.nonzero().T.to(torch_type(layer.indices_type))


MOVEMENT_LAYERS: dict[trt.LayerType, Callable[..., Tensor | Sequence[Tensor]]] = {
    trt.LayerType.CONSTANT: constant,
    trt.LayerType.IDENTITY: identity,
    trt.LayerType.CAST: cast,
    trt.LayerType.SHUFFLE: shuffle,
    trt.LayerType.SHAPE: shape,
    trt.LayerType.SQUEEZE: squeeze,
    trt.LayerType.UNSQUEEZE: unsqueeze,
    trt.LayerType.SLICE: slice_,
    trt.LayerType.CONCATENATION: concatenation,
    trt.LayerType.GATHER: gather,
    trt.LayerType.SCATTER: scatter,
    trt.LayerType.SELECT: select,
    trt.LayerType.ONE_HOT: one_hot,
    trt.LayerType.NON_ZERO: non_zero,
}
