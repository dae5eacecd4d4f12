"""TensorRT's layers as functions of tensors, typed as the network lowering needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NetworkTensor = Any
"""An `ITensor`."""


class Layers:
    """Adds layers to one network, and keeps the memory of its constants until the network is built.

    Strong typing: operands of one operation have one type, and nothing is cast that was not asked for. -1 in a shape is
    a size known when the engine runs.
    """

    def __init__(self, trt: Any, network: Any) -> None:
        self.trt = trt
        self.network = network
        self._held: list[Any] = []
        self._types = {
            torch.float32: trt.float32,
            torch.float16: trt.float16,
            torch.bfloat16: trt.bfloat16,
            torch.float8_e4m3fn: trt.fp8,
            torch.int32: trt.int32,
            torch.int64: trt.int64,
            torch.bool: trt.bool,
        }

    def data_type(self, dtype: torch.dtype) -> Any:
        """TensorRT's name of a type."""
        return self._types[dtype]

    def dtype(self, x: NetworkTensor) -> torch.dtype:
        """Torch's name of a tensor's type."""
        return next(known for known, name in self._types.items() if name == x.dtype)

    def constant(self, tensor: torch.Tensor) -> NetworkTensor:
        """A tensor whose memory the network reads in place."""
        return self._constant(tensor.contiguous(), self._types[tensor.dtype], tuple(tensor.shape), tensor.numel())

    def packed_constant(self, codes: torch.Tensor) -> NetworkTensor:
        """[..., n] bytes of two e2m1 numbers each, the first in the low bits -> fp4 [..., 2 n]."""
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        return self._constant(codes.contiguous(), self.trt.fp4, shape, 2 * codes.numel())

    def integers(self, values: Sequence[Any]) -> NetworkTensor:
        """Int32."""
        return self.constant(torch.tensor(values, dtype=torch.int32))

    def number(self, value: float, like: NetworkTensor) -> NetworkTensor:
        """A number of the type and rank of another tensor."""
        return self.constant(torch.full((1,) * len(like.shape), value, dtype=self.dtype(like)))

    def tensor(self, weight: Any) -> NetworkTensor:
        """A weight as it is, where it is an input of the network, or as a constant."""
        return self.constant(weight) if isinstance(weight, torch.Tensor) else weight

    def cast(self, x: NetworkTensor, data_type: Any) -> NetworkTensor:
        """x in another type, or itself."""
        return x if x.dtype == data_type else self.network.add_cast(x, data_type).get_output(0)

    def wide(self, x: NetworkTensor) -> NetworkTensor:
        """x in float32."""
        return self.cast(x, self.trt.float32)

    def output(self, x: NetworkTensor, name: str) -> NetworkTensor:
        """x, made an output of the network."""
        x.name = name
        self.network.mark_output(x)
        return x

    def add(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a + b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.SUM)

    def subtract(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a - b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.SUB)

    def multiply(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a * b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.PROD)

    def divide(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a / b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.DIV)

    def greater(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a > b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.GREATER)

    def equal(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a == b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.EQUAL)

    def both(self, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a and b."""
        return self._elementwise(a, b, self.trt.ElementWiseOperation.AND)

    def negate(self, x: NetworkTensor) -> NetworkTensor:
        """not x."""
        return self.network.add_unary(x, self.trt.UnaryOperation.NOT).get_output(0)

    def absolute(self, x: NetworkTensor) -> NetworkTensor:
        """|x|."""
        return self.network.add_unary(x, self.trt.UnaryOperation.ABS).get_output(0)

    def sqrt(self, x: NetworkTensor) -> NetworkTensor:
        """The square root of x."""
        return self.network.add_unary(x, self.trt.UnaryOperation.SQRT).get_output(0)

    def sigmoid(self, x: NetworkTensor) -> NetworkTensor:
        """1 / (1 + e^-x)."""
        return self.network.add_activation(x, self.trt.ActivationType.SIGMOID).get_output(0)

    def tanh(self, x: NetworkTensor) -> NetworkTensor:
        """tanh(x)."""
        return self.network.add_activation(x, self.trt.ActivationType.TANH).get_output(0)

    def select(self, condition: NetworkTensor, a: NetworkTensor, b: NetworkTensor) -> NetworkTensor:
        """a where the condition holds, else b."""
        return self.network.add_select(condition, a, b).get_output(0)

    def mean_of_last(self, x: NetworkTensor) -> NetworkTensor:
        """[..., n] -> [..., 1]."""
        axes = 1 << (len(x.shape) - 1)
        return self.network.add_reduce(x, self.trt.ReduceOperation.AVG, axes, keep_dims=True).get_output(0)

    def concat_last(self, parts: Sequence[NetworkTensor]) -> NetworkTensor:
        """Joined along the last axis."""
        layer = self.network.add_concatenation(list(parts))
        layer.axis = len(parts[0].shape) - 1
        return layer.get_output(0)

    def gather(self, x: NetworkTensor, indices: NetworkTensor, axis: int) -> NetworkTensor:
        """`torch.index_select`, with indices of any shape in the place of the axis."""
        return self.network.add_gather(x, indices, axis).get_output(0)

    def gather_rows(self, x: NetworkTensor, indices: NetworkTensor) -> NetworkTensor:
        """Rows `indices` [B, R] of x [B, T, D], each sequence's own -> [B, R, D]."""
        layer = self.network.add_gather_v2(x, self.unsqueeze(indices, 2), self.trt.GatherMode.ND)
        layer.num_elementwise_dims = 1
        return layer.get_output(0)

    def unsqueeze(self, x: NetworkTensor, *axes: int) -> NetworkTensor:
        """Axes of size 1 put in, as they will be numbered."""
        return self.network.add_unsqueeze(x, self.constant(torch.tensor(axes))).get_output(0)

    def shuffle(
        self,
        x: NetworkTensor,
        shape: Sequence[int],
        *,
        first: Sequence[int] | None = None,
        then: Sequence[int] | None = None,
    ) -> NetworkTensor:
        """x transposed, reshaped and transposed again; a 0 in `shape` keeps a size, and one -1 takes what is left."""
        layer = self.network.add_shuffle(x)
        if first is not None:
            layer.first_transpose = tuple(first)
        layer.reshape_dims = tuple(shape)
        if then is not None:
            layer.second_transpose = tuple(then)
        return layer.get_output(0)

    def count(self, x: NetworkTensor, axis: int) -> NetworkTensor:
        """0, 1, .. up to the size of x along an axis, int32."""
        sizes = self.network.add_shape(x).get_output(0)
        size = self.network.add_slice(sizes, (axis,), (1,), (1,)).get_output(0)
        layer = self.network.add_fill((1,), self.trt.FillOperation.LINSPACE, self.trt.int32)
        layer.set_input(0, size)
        layer.set_input(1, self.constant(torch.tensor(0, dtype=torch.int32)))
        layer.set_input(2, self.integers([1]))
        return layer.get_output(0)

    def matmul_transposed(self, x: NetworkTensor, weight: NetworkTensor) -> NetworkTensor:
        """x [B, T, in] times weight [1, out, in] -> [B, T, out]."""
        operation = self.trt.MatrixOperation
        return self.network.add_matrix_multiply(x, operation.NONE, weight, operation.TRANSPOSE).get_output(0)

    def quantize(self, x: NetworkTensor, scale: NetworkTensor) -> NetworkTensor:
        """e4m3(x / scale), one scale for all of x."""
        return self.network.add_quantize(x, scale, self.trt.fp8).get_output(0)

    def quantize_blocks(self, x: NetworkTensor, scale: NetworkTensor, size: int) -> tuple[NetworkTensor, NetworkTensor]:
        """Fp4 numbers and the e4m3 scales, in units of `scale`, of blocks along the last axis."""
        layer = self.network.add_dynamic_quantize(x, len(x.shape) - 1, size, self.trt.fp4, self.trt.fp8)
        layer.set_input(1, scale)
        return layer.get_output(0), layer.get_output(1)

    def dequantize(self, x: NetworkTensor, scale: NetworkTensor, data_type: Any) -> NetworkTensor:
        """x times its scale: one for all of x, or one for each block along the last axis."""
        return self.network.add_dequantize(x, scale, data_type).get_output(0)

    def rotary(self, x: NetworkTensor, cos: NetworkTensor, sin: NetworkTensor, positions: NetworkTensor) -> Any:
        """x [B, H, T, d] rotated by rows `positions` [B, T] of the tables [positions, d / 2], NeoX pairing."""
        layer = self.network.add_rotary_embedding(x, cos, sin, False, int(x.shape[3]))
        layer.set_input(3, positions)
        return layer.get_output(0)

    def kv_cache_update(self, cache: NetworkTensor, rows: NetworkTensor, starts: NetworkTensor) -> NetworkTensor:
        """The cache [B, H, positions, d] with rows [B, H, T, d] written from `starts` [B] on."""
        return self.network.add_kv_cache_update(cache, rows, starts, self.trt.KVCacheMode.LINEAR).get_output(0)

    def attention(
        self,
        q: NetworkTensor,
        keys: NetworkTensor,
        values: NetworkTensor,
        visible: NetworkTensor,
        lengths: NetworkTensor,
    ) -> NetworkTensor:
        """softmax(q k) v over the visible ones of the first `lengths` [B] keys, without a scale."""
        layer = self.network.add_attention_v2(
            q, keys, values, self.trt.AttentionNormalizationOp.SOFTMAX, self.trt.CausalMaskKind.NONE
        )
        layer.mask = visible
        layer.key_value_lengths = lengths
        layer.decomposable = True
        return layer.get_output(0)

    def all_reduce(self, x: NetworkTensor, ranks: int) -> NetworkTensor:
        """The sum of all ranks' x."""
        return self._collective(x, self.trt.CollectiveOperation.ALL_REDUCE, self.trt.ReduceOperation.SUM, ranks)

    def all_gather(self, x: NetworkTensor, ranks: int) -> NetworkTensor:
        """All ranks' x, joined along the first axis."""
        return self._collective(x, self.trt.CollectiveOperation.ALL_GATHER, self.trt.ReduceOperation.NONE, ranks)

    def _collective(self, x: NetworkTensor, operation: Any, reduction: Any, ranks: int) -> NetworkTensor:
        layer = self.network.add_dist_collective(x, operation, reduction, -1, [])
        layer.num_ranks = ranks
        return layer.get_output(0)

    def _elementwise(self, a: NetworkTensor, b: NetworkTensor, operation: Any) -> NetworkTensor:
        return self.network.add_elementwise(a, b, operation).get_output(0)

    def _constant(self, tensor: torch.Tensor, data_type: Any, shape: tuple[int, ...], count: int) -> NetworkTensor:
        self._held.append(tensor)
        weights = self.trt.Weights(data_type, tensor.data_ptr(), count)
        return self.network.add_constant(shape, weights).get_output(0)
