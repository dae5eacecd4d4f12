"""NVIDIA's own `tensorrt.plugin`, without TensorRT.

That package is Python alone and comes with TensorRT's bindings; TensorRT itself cannot be installed from the package
index. Here it stands on the bindings of `tensorrt_rtx`, which have all it needs but a few classes; those are below.
"""

from __future__ import annotations

import enum
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


@contextmanager
def tensorrt_plugin() -> Iterator[Any]:
    """`tensorrt.plugin` while the block runs, importable as that."""
    import tensorrt_rtx

    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None and spec.origin is not None, "pip install --no-deps tensorrt-cu13-bindings"
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "tensorrt"}
    tensorrt = ModuleType("tensorrt")
    tensorrt.__dict__.update({name: getattr(tensorrt_rtx, name) for name in dir(tensorrt_rtx) if name[:2] != "__"})
    for shim in (QuickPluginCreationRequest, IPluginV3QuickAOTBuild, ISymExpr, DimsExprs):
        setattr(tensorrt, shim.__name__, shim)
    tensorrt.IDimensionExpr = Dimension  # type: ignore[attr-defined]
    tensorrt.__path__ = [str(Path(spec.origin).parent)]
    _forget()
    sys.modules["tensorrt"] = tensorrt
    try:
        import tensorrt.plugin

        yield tensorrt.plugin
    finally:
        _forget()
        sys.modules.update(kept)


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
        del sys.modules[name]
