"""Which types and formats each builder can make engines of, for which GPUs: every rule once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.engine.config import Backend, BuildConfig, Dtype, capability_number
from dflash_trt.engine.tensorrt_api import TensorRTName
from dflash_trt.errors import UserError
from dflash_trt.plugins.gpus import SHARED_MEMORY
from dflash_trt.plugins.heads import HEAD_DIMS

Feature = Dtype | QuantAlgo | Literal["FP8 caches"]

COMPUTE_CAPABILITIES: dict[TensorRTName, tuple[str, ...]] = {
    "tensorrt_rtx": ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    "tensorrt": tuple(f"sm{number}" for number in SHARED_MEMORY),
}
"""What engines can be built for: by `tensorrt_rtx` anywhere, by `tensorrt` on that GPU, for which there are kernels."""

LEAST: dict[Feature, int] = {
    "float32": 80,
    "float16": 75,
    "bfloat16": 80,
    "FP8": 89,
    "NVFP4": 100,
    "W4A16_NVFP4": 100,
    "FP8 caches": 80,
}
"""The first compute capability that has it. Of e2m1 numbers that includes weights whose activations are unquantized."""

_PLUGIN_ONLY: tuple[Feature, ...] = ("FP8 caches",)


def is_supported(feature: Feature, backend: TensorRTName, compute_capability: str) -> bool:
    """Whether a builder makes engines with it for a GPU."""
    if feature in _PLUGIN_ONLY and backend != "tensorrt":
        return False
    return feature in LEAST and capability_number(compute_capability) >= LEAST[feature]


def check_support(
    backend: Backend,
    compute_capability: str | None,
    config: BuildConfig,
    target: TargetConfig,
    drafter: DrafterConfig,
) -> None:
    """Refuse what a builder or a GPU does not have.

    Raises:
        UserError: naming it, and what would work.
    """
    if backend == "torch":
        if compute_capability is not None:
            raise UserError(
                f"compute_capability is {compute_capability}, backend is torch, whose engines run on any GPU; leave "
                "out --compute_capability, or give --backend tensorrt_rtx"
            )
        return
    gpu = _known(backend, compute_capability)
    for feature, whose in _features(config, target, drafter):
        if not is_supported(feature, backend, gpu):
            raise UserError(_refusal(feature, whose, backend, gpu))
    if backend == "tensorrt":
        _check_heads(target, drafter)


def _known(backend: TensorRTName, compute_capability: str | None) -> str:
    """A compute capability that the builder has."""
    known = COMPUTE_CAPABILITIES[backend]
    if compute_capability is None:
        raise UserError(
            f"compute_capability is not given, backend is {backend}, whose engines are for one GPU; give "
            f"--compute_capability {' or '.join(known)}"
        )
    if compute_capability not in known:
        others = [each for each in COMPUTE_CAPABILITIES if compute_capability in COMPUTE_CAPABILITIES[each]]
        other = f", or give --backend {others[0]}" if others else ""
        raise UserError(
            f"compute_capability is {compute_capability}, backend {backend} builds for {', '.join(known)}{other}"
        )
    return compute_capability


def _check_heads(target: TargetConfig, drafter: DrafterConfig) -> None:
    for whose, head_dim in (("the target", target.head_dim), ("the drafter", drafter.head_dim)):
        if head_dim not in HEAD_DIMS:
            raise UserError(
                f"{whose} has a head_dim of {head_dim}, the plugin of tensorrt takes multiples of "
                f"{HEAD_DIMS.step} up to {HEAD_DIMS[-1]}; give --backend torch, or tensorrt_rtx for an "
                "RTX GPU"
            )


def _features(config: BuildConfig, target: TargetConfig, drafter: DrafterConfig) -> Iterator[tuple[Feature, str]]:
    """All that a build needs, and what needs it."""
    yield config.dtype, "dtype"
    for whose, quantization in (("the target", target.quantization), ("the drafter", drafter.quantization)):
        if quantization is not None:
            if quantization.quant_algo is not None:
                yield quantization.quant_algo, whose
            if quantization.kv_cache_quant_algo == "FP8":
                yield "FP8 caches", whose


def _refusal(feature: Feature, whose: str, backend: TensorRTName, compute_capability: str) -> str:
    what = f"{whose} has FP8 caches" if feature == "FP8 caches" else f"{whose} is {feature}"
    ways = ", or ".join([_instead(feature, backend, compute_capability), *_elsewhere(feature, backend)])
    return f"{what}, which {backend} does not build for {compute_capability}; {ways}"


def _elsewhere(feature: Feature, backend: TensorRTName) -> list[str]:
    """Options that would give it: other GPUs of this builder or, where it has it for none, other builders."""
    gpus = _gpus_with(feature, backend)
    if gpus:
        return [f"give --compute_capability {' or '.join(gpus)}"]
    return [f"give --backend {other}" for other in COMPUTE_CAPABILITIES if _gpus_with(feature, other)]


def _gpus_with(feature: Feature, backend: TensorRTName) -> list[str]:
    return [each for each in COMPUTE_CAPABILITIES[backend] if is_supported(feature, backend, each)]


def _instead(feature: Feature, backend: TensorRTName, compute_capability: str) -> str:
    """What works for the same GPU."""
    if feature == "FP8 caches":
        return "convert with --kv_cache_qformat none"
    if feature in get_args(Dtype):
        types = [dtype for dtype in get_args(Dtype) if is_supported(dtype, backend, compute_capability)]
        return f"give --dtype {' or '.join(types)}"
    fp8 = "fp8 or " if is_supported("FP8", backend, compute_capability) else ""
    return f"convert it with {fp8}bf16"
