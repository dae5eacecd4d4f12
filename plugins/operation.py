"""What TensorRT is told of an operation: its inputs, attributes, outputs, sizes, and the kernel for given types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_trt.plugins.kernel import Kernel, takes

Shapes = Mapping[str, tuple[Any, ...]]
"""Shapes by input: numbers, or TensorRT's symbolic expressions, which take +, -, * and // with one on the left."""

Types = Mapping[str, torch.dtype]
"""Types by input."""

Attributes = Mapping[str, Any]
"""Values by attribute."""


@dataclass(frozen=True)
class Output:
    """A tensor that an operation gives."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Operation:
    """One operation, which is one kernel: TensorRT passes it inputs, sizes and outputs, in these orders."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Callable[[Shapes, Types, Attributes], Mapping[str, Any]]
    """The int32 arguments of the kernel, by name and in order."""
    describe: Callable[[Shapes, Types, Attributes], Mapping[str, Output]]
    """Every output."""
    configure: Callable[[Shapes, Types, Attributes], Kernel]
    """The kernel. Shapes are numbers here, -1 where they change between calls; what they do not, may be constants."""
    attributes: Mapping[str, type] = field(default_factory=dict)
    """Types of what it is configured with, besides `compute_capability`, that of the GPU, which every operation has."""

    def kernel(self, shapes: Shapes, types: Types, attributes: Attributes) -> Kernel:
        """The kernel for inputs of these shapes, -1 where they change between calls, and types.

        Raises:
            ValueError: it takes its arguments in another order than TensorRT passes them, or other types.
        """
        kernel = self.configure(shapes, types, attributes)
        passed = [*self.inputs, *kernel.sizes, *self.outputs]
        if list(kernel.parameters) != passed:
            raise ValueError(f"{self.name} takes {list(kernel.parameters)}, TensorRT passes {passed}")
        for name in self.inputs:
            if not takes(kernel.parameters[name], types[name]):
                raise ValueError(f"{self.name} takes {name} as {kernel.parameters[name]}, it is {types[name]}")
        return kernel

    def arguments(self, kernel: Kernel, shapes: Shapes, types: Types, attributes: Attributes) -> Mapping[str, Any]:
        """The values of `kernel.sizes` for these shapes.

        Raises:
            ValueError: the declaration has others.
        """
        sizes = self.sizes(shapes, types, attributes)
        if tuple(sizes) != kernel.sizes:
            raise ValueError(f"{self.name} takes the sizes {kernel.sizes}, {tuple(sizes)} are declared")
        return sizes
