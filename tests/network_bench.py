"""A small network being written and then interpreted: what the interpreter's own tests are made with."""

from __future__ import annotations

import numpy as np
import tensorrt_rtx as trt
from torch import Tensor

from tests.network_formats import TORCH_TYPES
from tests.network_interpreter import Input, NetworkInterpreter

_LOGGER = trt.Logger(trt.Logger.ERROR)
_TYPES = {dtype: known for known, dtype in TORCH_TYPES.items() if known != trt.fp4}


class Bench:
    """One rank's network, and the values of its inputs."""

    def __init__(self) -> None:
        self.builder = trt.Builder(_LOGGER)
        self.network = self.builder.create_network(0)
        self.given: dict[str, Input] = {}
        self.kept: list[object] = []

    def input(self, value: Tensor, shape: tuple[int, ...] | None = None) -> trt.ITensor:
        """An input that will have this value, declared with its shape or with the one given (-1: dynamic)."""
        name = f"x{self.network.num_inputs}"
        self.given[name] = value
        return self.network.add_input(name, _TYPES[value.dtype], tuple(value.shape) if shape is None else shape)

    def constant(self, value: object, dtype: trt.DataType = trt.int32) -> trt.ITensor:
        """Of numbers or an array, of a type that NumPy has."""
        array = np.array(value, dtype=trt.nptype(dtype))
        return self.raw(array, dtype, array.shape)

    def raw(self, array: np.ndarray, dtype: trt.DataType, shape: tuple[int, ...]) -> trt.ITensor:
        """Of the bytes of an array: of a type that NumPy lacks."""
        self.kept.append(array)
        weights = trt.Weights(dtype, array.ctypes.data, int(np.prod(shape, dtype=np.int64)))
        return self.network.add_constant(shape, weights).get_output(0)

    def mark(self, layer: trt.ILayer | trt.ITensor) -> None:
        """Makes a tensor, or the first output of a layer, the next output: y0, y1, ..."""
        tensor = layer if isinstance(layer, trt.ITensor) else layer.get_output(0)
        tensor.name = f"y{self.network.num_outputs}"
        self.network.mark_output(tensor)

    def run(self, *layers: trt.ILayer | trt.ITensor) -> list[Tensor]:
        for layer in layers:
            self.mark(layer)
        return self.outputs()

    def outputs(self) -> list[Tensor]:
        """The values of all tensors that were made outputs, in that order."""
        return list(NetworkInterpreter([self.network]).run([self.given])[0].values())

    def value(self, layer: trt.ILayer | trt.ITensor) -> Tensor:
        (value,) = self.run(layer)
        return value
