"""What TensorRT's layers that compute mean, in torch, after the operators' documentation.

A function takes the layer and its inputs (None where an optional one is not set) and returns its output, or all of them.
Results of arithmetic on real numbers are float64, which the interpreter rounds; everything else has its final type.
What is undefined in TensorRT, such as an index past the end, is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorrt_rtx as trt
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.network_formats import NetworkFault, of_one_rank, of_one_type, torch_type, wide, within


def axes_of(mask: int) -> list[int]:
    return [axis for axis in range(mask.bit_length()) if mask >> axis & 1]


def one_axis(mask: int) -> int:
    (axis,) = axes_of(mask)
    return axis


_SAME_ON_INTEGERS: dict[trt.ElementWiseOperation, Callable[[Tensor, Tensor], Tensor]] = {
    trt.ElementWiseOperation.SUM: torch.add,
    trt.ElementWiseOperation.PROD: torch.mul,
    trt.ElementWiseOperation.MAX: torch.maximum,
    trt.ElementWiseOperation.MIN: torch.minimum,
    trt.ElementWiseOperation.SUB: torch.sub,
    trt.ElementWiseOperation.POW: torch.pow,
    trt.ElementWiseOperation.FLOOR_DIV: lambda a, b: torch.div(a, b, rounding_mode="floor"),
    trt.ElementWiseOperation.AND: torch.logical_and,
    trt.ElementWiseOperation.OR: torch.logical_or,
    trt.ElementWiseOperation.XOR: torch.logical_xor,
    trt.ElementWiseOperation.EQUAL: torch.eq,
    trt.ElementWiseOperation.GREATER: torch.gt,
    trt.ElementWiseOperation.LESS: torch.lt,
}


def elementwise(layer: trt.IElementWiseLayer, a: Tensor, b: Tensor) -> Tensor:
    of_one_type(a, b)
    of_one_rank(a, b)
    if layer.op == trt.ElementWiseOperation.DIV:
        return torch.div(wide(a), wide(b), rounding_mode=None if a.is_floating_point() else "trunc")
    return _SAME_ON_INTEGERS[layer.op](wide(a), wide(b))


_UNARY = {
    getattr(trt.UnaryOperation, name): getattr(torch, name.lower())
    for name in (
        *("EXP", "LOG", "SQRT", "ABS", "NEG", "SIN", "COS", "TAN", "SINH", "COSH", "ASIN", "ACOS", "ATAN", "ASINH"),
        *("ACOSH", "ATANH", "CEIL", "FLOOR", "ERF", "SIGN", "ROUND", "ISINF", "ISNAN"),
    )
} | {trt.UnaryOperation.RECIP: torch.reciprocal, trt.UnaryOperation.NOT: torch.logical_not}


def unary(layer: trt.IUnaryLayer, x: Tensor) -> Tensor:
    return _UNARY[layer.op](wide(x))


_ACTIVATIONS: dict[trt.ActivationType, Callable[[Tensor, float, float], Tensor]] = {
    trt.ActivationType.RELU: lambda x, a, b: x.clamp(min=0),
    trt.ActivationType.SIGMOID: lambda x, a, b: x.sigmoid(),
    trt.ActivationType.TANH: lambda x, a, b: x.tanh(),
    trt.ActivationType.LEAKY_RELU: lambda x, a, b: torch.where(x >= 0, x, a * x),
    trt.ActivationType.ELU: lambda x, a, b: torch.where(x >= 0, x, a * x.expm1()),
    trt.ActivationType.SELU: lambda x, a, b: b * torch.where(x > 0, x, a * x.expm1()),
    trt.ActivationType.SOFTSIGN: lambda x, a, b: x / (1 + x.abs()),
    trt.ActivationType.SOFTPLUS: lambda x, a, b: a * torch.log1p((b * x).exp()),
    trt.ActivationType.CLIP: lambda x, a, b: x.clamp(max=b).clamp(min=a),
    trt.ActivationType.HARD_SIGMOID: lambda x, a, b: (a * x + b).clamp(0, 1),
    trt.ActivationType.SCALED_TANH: lambda x, a, b: a * (b * x).tanh(),
    trt.ActivationType.THRESHOLDED_RELU: lambda x, a, b: torch.where(x > a, x, 0.0),
    trt.ActivationType.GELU_ERF: lambda x, a, b: F.gelu(x),
    trt.ActivationType.GELU_TANH: lambda x, a, b: F.gelu(x, approximate="tanh"),
}


def activation(layer: trt.IActivationLayer, x: Tensor) -> Tensor:
    return _ACTIVATIONS[layer.type](x.double(), layer.alpha, layer.beta)


def reduce(layer: trt.IReduceLayer, x: Tensor) -> Tensor:
    axes, keep = axes_of(layer.axes), layer.keep_dims
    if layer.op == trt.ReduceOperation.PROD:
        for axis in axes:
            x = wide(x).prod(axis, keepdim=True).to(wide(x).dtype)
        return x if keep else x.squeeze(tuple(axes))
    if layer.op == trt.ReduceOperation.AVG and x.is_floating_point():
        return x.double().mean(axes, keepdim=keep)
    if layer.op == trt.ReduceOperation.SUM:
        return wide(x).sum(axes, keepdim=keep, dtype=wide(x).dtype)
    if layer.op in (trt.ReduceOperation.MAX, trt.ReduceOperation.MIN):
        return (torch.amax if layer.op == trt.ReduceOperation.MAX else torch.amin)(wide(x), axes, keep)
    raise NetworkFault(f"no meaning is known for {layer.op.name} of {x.dtype}")


def softmax(layer: trt.ISoftMaxLayer, x: Tensor) -> Tensor:
    return x.double().softmax(one_axis(layer.axes))


def top_k(layer: trt.ITopKLayer, x: Tensor, k: Tensor | None = None) -> Sequence[Tensor]:
    """Of equal values the one with the lower index first, which TensorRT does not promise."""
    count, axis = layer.k if k is None else int(k), one_axis(layer.axes)
    values, indices = wide(x).sort(dim=axis, descending=layer.op == trt.TopKOperation.MAX, stable=True)
    within(torch.tensor([count]), x.shape[axis] + 1)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count).to(torch_type(layer.indices_type))


def fill(
    layer: trt.IFillLayer, dims: Tensor | None = None, start: Tensor | None = None, step: Tensor | None = None
) -> Tensor:
    """LINSPACE: start + i * step of the first dimension + j * step of the second, and so on."""
    if layer.operation != trt.FillOperation.LINSPACE:
        raise NetworkFault(f"{layer.operation.name} has no one answer")
    sizes = list(layer.shape) if dims is None else dims.tolist()
    steps = [layer.beta] if step is None else step.reshape(-1).tolist()
    if len(steps) != len(sizes):
        raise NetworkFault(f"{len(steps)} steps for the {len(sizes)} dimensions of {sizes}")
    to_type = torch_type(layer.to_type)
    total = torch.full(
        sizes, layer.alpha if start is None else start.item(), dtype=wide(torch.empty(0, dtype=to_type)).dtype
    )
    for axis, (size, each) in enumerate(zip(sizes, steps, strict=True)):
        ramp = torch.arange(size).to(total.dtype) * torch.tensor(each).to(total.dtype)
        total += ramp.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return total


def matrix_multiply(layer: trt.IMatrixMultiplyLayer, a: Tensor, b: Tensor) -> Tensor:
    of_one_type(a, b)
    vectors = [operation == trt.MatrixOperation.VECTOR for operation in (layer.op0, layer.op1)]
    left, right = (
        x.double().mT if operation == trt.MatrixOperation.TRANSPOSE else x.double()
        for x, operation in ((a, layer.op0), (b, layer.op1))
    )
    left = left.unsqueeze(-2) if vectors[0] else left
    right = right.unsqueeze(-1) if vectors[1] else right
    of_one_rank(left, right)
    product = left @ right
    product = product.squeeze(-1) if vectors[1] else product
    return product.squeeze(-1 if vectors[1] else -2) if vectors[0] else product


def einsum(layer: trt.IEinsumLayer, *tensors: Tensor) -> Tensor:
    of_one_type(*tensors)
    return torch.einsum(layer.equation, *map(wide, tensors))


def normalization(layer: trt.INormalizationLayer, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    of_one_type(x, scale, bias)
    of_one_rank(x, scale, bias)
    if layer.num_groups != 1:
        raise NetworkFault(f"{layer.num_groups} groups are not known here")
    variance, mean = torch.var_mean(x.double(), axes_of(layer.axes), correction=0, keepdim=True)
    return (x.double() - mean) / (variance + layer.epsilon).sqrt() * scale.double() + bias.double()


def scale(layer: trt.IScaleLayer, x: Tensor) -> Tensor:
    """(x * scale + shift) ^ power, of one number, one a channel, or one an element."""

    def coefficients(weights: object, default: float) -> Tensor:
        values = torch.as_tensor(weights).double()
        if not values.numel():
            return torch.tensor(default, dtype=torch.float64)
        if layer.mode == trt.ScaleMode.CHANNEL:
            return values.reshape([-1 if axis == layer.channel_axis else 1 for axis in range(x.ndim)])
        return values.reshape(() if layer.mode == trt.ScaleMode.UNIFORM else x.shape[layer.channel_axis :])

    return (x.double() * coefficients(layer.scale, 1) + coefficients(layer.shift, 0)) ** coefficients(layer.power, 1)


def cumulative(layer: trt.ICumulativeLayer, x: Tensor, axis: Tensor) -> Tensor:
    along = int(axis)
    x = wide(x).flip(along) if layer.reverse else wide(x)
    total = x.cumsum(along, dtype=x.dtype)
    total = total - x if layer.exclusive else total
    return total.flip(along) if layer.reverse else total


ARITHMETIC_LAYERS: dict[trt.LayerType, Callable[..., Tensor | Sequence[Tensor]]] = {
    trt.LayerType.ELEMENTWISE: elementwise,
    trt.LayerType.UNARY: unary,
    trt.LayerType.ACTIVATION: activation,
    trt.LayerType.REDUCE: reduce,
    trt.LayerType.SOFTMAX: softmax,
    trt.LayerType.TOPK: top_k,
    trt.LayerType.FILL: fill,
    trt.LayerType.MATRIX_MULTIPLY: matrix_multiply,
    trt.LayerType.EINSUM: einsum,
    trt.LayerType.NORMALIZATION: normalization,
    trt.LayerType.SCALE: scale,
    trt.LayerType.CUMULATIVE: cumulative,
}
