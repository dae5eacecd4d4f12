"""TensorRT as it is installed: `tensorrt`, or `tensorrt_rtx`, which has the same API and builds without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

from dflash_trt.errors import UserError

TensorRTName = Literal["tensorrt", "tensorrt_rtx"]
_INSTALL = {
    "tensorrt": "pip install tensorrt-cu13",
    "tensorrt_rtx": "pip install dflash-trt[rtx]",
}


@dataclass(frozen=True)
class TensorRT:
    """One of the two modules."""

    name: TensorRTName
    trt: Any
    """The module."""

    @property
    def version(self) -> str:
        """Of the library; an engine runs on the one that built it."""
        return str(self.trt.__version__)

    @property
    def has_plugins(self) -> bool:
        """Whether networks take plugins that are written in Python."""
        return self.name == "tensorrt"


def load_tensorrt(name: TensorRTName | None = None) -> TensorRT:
    """The one asked for, or the first that is installed.

    Raises:
        UserError: it is not installed, or cannot be loaded.
    """
    names: tuple[TensorRTName, ...] = get_args(TensorRTName) if name is None else (name,)
    reasons = []
    for each in names:
        try:
            return TensorRT(each, import_module(each))
        except ImportError as error:
            reasons.append(f"{each} ({_reason(each, error)}; {_INSTALL[each]})")
    raise UserError(f"cannot load {' or '.join(reasons)}")


def _reason(name: str, error: ImportError) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name == name
    return "is not installed" if missing else str(error).splitlines()[0]
