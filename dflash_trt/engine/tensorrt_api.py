"""TensorRT as it is installed: `tensorrt`, or `tensorrt_rtx`, which has the same API and builds without a GPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, get_args

from dflash_trt.errors import UserError

TensorRTName = Literal["tensorrt", "tensorrt_rtx"]
_LOG = logging.getLogger(__name__)
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
    logger: Any
    """An `ILogger`: `errors` holds what was wrong, `last_error` the last of it; warnings go to Python's logging."""

    @property
    def version(self) -> str:
        """Of the library; an engine runs on the one that built it."""
        return str(self.trt.__version__)


def load_tensorrt(name: TensorRTName | None = None) -> TensorRT:
    """The one asked for, or the first that is installed.

    Raises:
        UserError: it is not installed, or cannot be loaded.
    """
    names: tuple[TensorRTName, ...] = get_args(TensorRTName) if name is None else (name,)
    reasons = []
    for each in names:
        try:
            return _loaded(each)
        except ImportError as error:
            reasons.append(f"{each} ({_reason(each, error)}; {_INSTALL[each]})")
    raise UserError(f"cannot load {' or '.join(reasons)}")


@cache
def _loaded(name: TensorRTName) -> TensorRT:
    """Once a process: TensorRT keeps the first logger that it is given."""
    trt = import_module(name)
    return TensorRT(name, trt, _logger(trt))


def _logger(trt: Any) -> Any:
    severity = trt.ILogger.Severity

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        @property
        def last_error(self) -> str:
            return self.errors[-1] if self.errors else "it does not say why"

        def log(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                self.errors.append(message)
            elif level == severity.WARNING:
                _LOG.warning("%s: %s", trt.__name__, message)

    return Logger()


def _reason(name: str, error: ImportError) -> str:
    missing = isinstance(error, ModuleNotFoundError) and error.name == name
    return "is not installed" if missing else str(error).splitlines()[0]
