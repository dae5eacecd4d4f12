"""NVIDIA's own `tensorrt.plugin`, without TensorRT.

That package is Python alone and comes with TensorRT's bindings; TensorRT itself cannot be installed from the package
index. Here it stands on the bindings of `tensorrt_rtx`, which have all it needs but a few classes; those are below.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


class QuickPluginCreationRequest(enum.Enum):
    """What kind of plugin a network asks for."""

    UNKNOWN = enum.auto()
    PREFER_JIT = enum.auto()
    PREFER_AOT = enum.auto()
    STRICT_JIT = enum.auto()
    STRICT_AOT = enum.auto()


class IPluginV3QuickAOTBuild:
    """TensorRT calls it; what it calls is in NVIDIA's Python."""


class ISymExpr:
    """An argument or launch parameter, as NVIDIA's Python fills it in: type, dtype, expr."""


@dataclass(frozen=True)
class Dimension:
    """A symbolic dimension that can be evaluated, for `IDimensionExpr`."""

    value: Callable[[Mapping[str, int]], int]
    constant: bool = False

    @classmethod
    def named(cls, name: str) -> Dimension:
        """One that differs between calls."""
        return cls(lambda sizes: sizes[name])

    def is_constant(self) -> bool:
        """As TensorRT's."""
        return self.constant

    def get_constant_value(self) -> int:
        """As TensorRT's."""
        assert self.constant
        return self.value({})


class ExprBuilder:
    """Expressions of dimensions, for `IExprBuilder`."""

    def constant(self, value: int) -> Dimension:
        """As TensorRT's."""
        return Dimension(lambda sizes: value, constant=True)

    def operation(self, op: Any, first: Dimension, second: Dimension) -> Dimension:
        """As TensorRT's, for what the plugin uses."""
        compute: Callable[[int, int], int] = {
            "SUM": lambda a, b: a + b,
            "SUB": lambda a, b: a - b,
            "PROD": lambda a, b: a * b,
            "FLOOR_DIV": lambda a, b: a // b,
            "CEIL_DIV": lambda a, b: -(-a // b),
            "MAX": max,
            "MIN": min,
        }[op.name]
        value = lambda sizes: compute(first.value(sizes), second.value(sizes))  # noqa: E731
        return Dimension(value, first.constant and second.constant)


class DimsExprs(list[Any]):
    """A shape of expressions."""

    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


Dims = tuple[int | str, ...]
"""A shape: numbers, and names of dimensions that differ between calls."""


def static(dims: Dims) -> tuple[int, ...]:
    """As TensorRT has it: -1 where calls differ."""
    return tuple(-1 if isinstance(size, str) else size for size in dims)


@dataclass(frozen=True)
class Embedded:
    """What TensorRT has of an operation after it asked for everything."""

    types: list[Any]
    """Of outputs."""
    shapes: list[list[Dimension]]
    aliases: list[int]
    formats: list[tuple[Any, Any]]
    """Types and layouts of inputs and outputs."""
    name: str
    """Of the kernel."""
    ptx: str
    launch: Any
    arguments: list[Any]
    """Between inputs and outputs."""


class _Arguments(dict[int, Any]):
    nbSymExprs = 0


def ask(made: Any, tensors: Sequence[Any], dims: Sequence[Dims]) -> Embedded:
    """Ask for everything in the order in which TensorRT builds with an ahead-of-time plugin.

    Args:
        made: what an operation gives for `network.add_plugin`.
        tensors: its inputs.
        dims: their shapes.
    """
    import tensorrt_rtx as trt

    _, _, plugin = made(QuickPluginCreationRequest.STRICT_AOT)
    count, types = len(tensors), [tensor.dtype for tensor in tensors]
    output_types = plugin.get_output_data_types(types, [len(each) for each in dims])
    inputs = [_dimensions(each) for each in dims]
    shapes = plugin.get_output_shapes(inputs, [], ExprBuilder())
    descs = [
        *(_desc(trt, kind, static(each)) for kind, each in zip(types, dims, strict=True)),
        *(_desc(trt, kind, (-1,) * len(each)) for kind, each in zip(output_types, shapes, strict=True)),
    ]
    formats = plugin.get_supported_format_combinations(descs, count)
    plugin.configure_plugin(descs[:count], descs[count:])
    plugin.set_tactic(0)
    launch, arguments = type("Launch", (), {})(), _Arguments()
    plugin.get_launch_params(inputs, descs, count, launch, arguments, ExprBuilder())
    name, ptx = plugin.get_kernel([desc.desc for desc in descs[:count]], [desc.desc for desc in descs[count:]])
    assert list(arguments) == list(range(arguments.nbSymExprs))
    return Embedded(
        types=output_types,
        shapes=[list(shape) for shape in shapes],
        aliases=[plugin.get_aliased_input(index) for index in range(len(shapes))],
        formats=[(desc.type, desc.format) for desc in formats],
        name=name,
        ptx=ptx.decode(),
        launch=launch,
        arguments=list(arguments.values()),
    )


def _dimensions(dims: Dims) -> DimsExprs:
    exprs = DimsExprs(len(dims))
    for index, size in enumerate(dims):
        exprs[index] = Dimension.named(size) if isinstance(size, str) else ExprBuilder().constant(size)
    return exprs


def _desc(trt: Any, kind: Any, dims: tuple[int, ...]) -> Any:
    dynamic, desc = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
    desc.dims, desc.type, desc.format = dims, kind, trt.TensorFormat.LINEAR
    dynamic.desc = desc
    return dynamic


@contextmanager
def tensorrt_plugin() -> Iterator[Any]:
    """`tensorrt.plugin` while the block runs, importable as that."""
    others = _taken()
    sys.modules.update(_modules())
    try:
        yield sys.modules["tensorrt.plugin"]
    finally:
        _taken()
        sys.modules.update(others)


@cache
def _modules() -> dict[str, ModuleType]:
    """Imported once: TensorRT's registry of plugins keeps what the modules put there, and is the process's own."""
    import tensorrt_rtx

    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None and spec.origin is not None, "pip install --no-deps tensorrt-cu13-bindings"
    tensorrt = ModuleType("tensorrt")
    tensorrt.__dict__.update({name: getattr(tensorrt_rtx, name) for name in dir(tensorrt_rtx) if name[:2] != "__"})
    for shim in (QuickPluginCreationRequest, IPluginV3QuickAOTBuild, ISymExpr, DimsExprs):
        setattr(tensorrt, shim.__name__, shim)
    tensorrt.IDimensionExpr = Dimension  # type: ignore[attr-defined]
    tensorrt.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["tensorrt"] = tensorrt
    importlib.import_module("tensorrt.plugin")
    return _taken()


def _taken() -> dict[str, ModuleType]:
    """What is imported as TensorRT, no longer imported."""
    names = [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]
    return {name: sys.modules.pop(name) for name in names}
