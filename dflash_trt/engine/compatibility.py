"""What builds an engine here, and whether this machine can run one that was built."""

from __future__ import annotations

import torch

from dflash_trt.engine.config import Backend, Builder
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.tensorrt_api import TensorRTName, load_tensorrt
from dflash_trt.errors import UserError
from dflash_trt.plugins.installed_triton import require_triton
from dflash_trt.plugins.plugin_hash import plugin_hash

MISSING = "not installed"
"""The version of a TensorRT that is not here, in the plan of a build."""


def builder_here(backend: Backend, compute_capability: str | None) -> Builder:
    """The builder of engines that this machine builds, or would if its TensorRT were installed."""
    version = torch.__version__ if backend == "torch" else installed_version(backend) or MISSING
    return Builder(backend, version, compute_capability, plugin_hash() if backend == "tensorrt" else None)


def installed_version(name: TensorRTName) -> str | None:
    """The version of a TensorRT, or None where it cannot be loaded."""
    try:
        return load_tensorrt(name).version
    except UserError:
        return None


def gpu_here(device: torch.device | None = None) -> str | None:
    """The compute capability of a GPU, sm90 for one, or None where there is none.

    Args:
        device: a CUDA device; None, as cuda without a number, is the one that builds and runs where no other is named.
    """
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def check_builds_here(builder: Builder) -> None:
    """Refuse to begin a build that this machine cannot end.

    Raises:
        UserError: its TensorRT is not installed, or builds for the GPU that it runs on only, and that is another; or
            Triton is not, which its plugin needs.
    """
    if builder.uses_plugins:
        require_triton("the plugin")
    tensorrt, here = load_tensorrt(builder.tensorrt), gpu_here()
    if tensorrt.name == "tensorrt" and here != builder.compute_capability:
        raise UserError(
            f"compute_capability is {builder.compute_capability}, this machine has {_gpu(here)}, and tensorrt builds "
            "only for the GPU that it runs on; build there, or give --backend tensorrt_rtx for an RTX GPU"
        )


def check_runs_here(engine: Engine, device: torch.device) -> None:
    """Refuse a TensorRT engine that this machine cannot run, before TensorRT tries to.

    Args:
        device: that it is to run on; of a CPU, whether the GPU of this machine could.

    Raises:
        UserError: saying what built it and what is here.
    """
    builder = engine.config.builder
    if builder.tensorrt is None:
        return
    plugin = plugin_hash() if builder.uses_plugins else None
    gpu = gpu_here(device if device.type == "cuda" else None)
    refusal = why_not(builder, installed_version(builder.tensorrt), gpu, plugin)
    if refusal is not None:
        raise UserError(f"{engine.path}: {refusal}")


def requirements(builder: Builder) -> str:
    """What an engine needs to run."""
    if builder.tensorrt is None:
        return "a CPU, or a CUDA GPU"
    return f"{builder.backend} {builder.version} and a GPU of compute capability {builder.compute_capability}"


def why_not(builder: Builder, version: str | None, gpu: str | None, plugin: str | None) -> str | None:
    """Why a TensorRT engine does not run, or None.

    Args:
        version: of its TensorRT as it is installed.
        gpu: the compute capability of the GPU that is there.
        plugin: the hash of the plugin as it is installed.
    """
    built = f"was built by {builder.backend} {builder.version} for {builder.compute_capability}"
    if version != builder.version:
        return f"{built}, {builder.backend} is {version or MISSING} here; install that version, or build it again"
    if gpu != builder.compute_capability:
        return f"{built}, this machine has {_gpu(gpu)}; it needs {requirements(builder)}"
    if plugin != builder.plugin_hash:
        return f"{built} with plugin {builder.plugin_hash}, the plugin here is {plugin}; build it again"
    return None


def _gpu(compute_capability: str | None) -> str:
    return "no GPU" if compute_capability is None else f"a GPU of {compute_capability}"
