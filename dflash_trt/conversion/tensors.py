"""What a stored tensor becomes: its values in the new format, and the scales that stand beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.safetensors_writer import TensorSpec
from dflash_trt.checkpoint.weights import Weights, finite_in
from dflash_trt.conversion.calibration import Calibration
from dflash_trt.conversion.plan import ModelPlan
from dflash_trt.quantization.fp8 import fp8_scale, quantize_fp8
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK, nvfp4_scale_2, quantize_nvfp4

_WEIGHT = ".weight"
_CACHED = {".k_proj.weight": "k_scale", ".v_proj.weight": "v_scale"}


def specs(plan: ModelPlan, name: str) -> list[TensorSpec]:
    """What will be stored for the source's tensor `name`, known from its header."""
    shape, dtype = plan.weights.shape(name), plan.weights.dtype(name)
    module = name.removesuffix(_WEIGHT)
    found = [TensorSpec(name, _unquantized_dtype(plan, dtype), shape)]
    if _is_quantized(plan, name):
        found = _quantized_specs(plan, module, shape)
    return found + [TensorSpec(f"{module}.{scale}", torch.float32, ()) for scale in _cache_scales(plan, name)]


@dataclass(frozen=True)
class Scales:
    """The scales that a tensor alone does not show.

    Attributes:
        amaxes: largest magnitude, a float32 scalar, of every weight that shares a scale with others, by module.
        calibration: what running the model showed; None where nothing is calibrated.
    """

    amaxes: Mapping[str, torch.Tensor]
    calibration: Calibration | None


def convert_tensor(plan: ModelPlan, weights: Weights, name: str, scales: Scales) -> dict[str, torch.Tensor]:
    """The tensors that `specs` announces for the source's tensor `name`, by their names.

    Args:
        plan: what becomes of the model.
        weights: the file that holds the tensor.
        name: the tensor.
        scales: those that follow from more than the tensor.

    Raises:
        UserError: the tensor has a value that is not finite, or becomes infinite in its new type.
    """
    tensor = weights.read(name)
    module = name.removesuffix(_WEIGHT)
    if _is_quantized(plan, name):
        found = _quantize(plan, tensor, f"{weights.file_of(name)}: {name}", module, scales)
    else:
        found = {name: _unquantized(plan, tensor, f"{weights.file_of(name)}: {name}")}
    for scale in _cache_scales(plan, name):
        assert scales.calibration is not None
        attention = module.rpartition(".")[0]
        amaxes = scales.calibration.keys if scale == "k_scale" else scales.calibration.values
        found[f"{module}.{scale}"] = fp8_scale(torch.tensor(amaxes[attention]))
    return found


def _quantize(
    plan: ModelPlan, weight: torch.Tensor, where: str, module: str, scales: Scales
) -> dict[str, torch.Tensor]:
    fused = plan.fused_with(module)
    input_scale = fp8_scale
    if plan.algo == "FP8":
        stored = quantize_fp8(weight, where)._asdict()
    else:
        shared = None
        if len(fused) > 1:
            shared = nvfp4_scale_2(torch.stack([scales.amaxes[each] for each in fused]).max())
        stored = quantize_nvfp4(weight, where, shared)._asdict()
        input_scale = nvfp4_scale_2
    if module in plan.calibrated_inputs:
        assert scales.calibration is not None
        largest = max(scales.calibration.inputs[each] for each in fused)
        stored["input_scale"] = input_scale(torch.tensor(largest))
    return {f"{module}.{field}": tensor for field, tensor in stored.items()}


def _quantized_specs(plan: ModelPlan, module: str, shape: tuple[int, ...]) -> list[TensorSpec]:
    *leading, columns = shape
    if plan.algo == "FP8":
        fields = {"weight": (torch.float8_e4m3fn, shape), "weight_scale": (torch.float32, ())}
    else:
        fields = {
            "weight": (torch.uint8, (*leading, columns // 2)),
            "weight_scale": (torch.float8_e4m3fn, (*leading, columns // NVFP4_BLOCK)),
            "weight_scale_2": (torch.float32, ()),
        }
    if module in plan.calibrated_inputs:
        fields["input_scale"] = (torch.float32, ())
    return [TensorSpec(f"{module}.{field}", dtype, size) for field, (dtype, size) in fields.items()]


def _is_quantized(plan: ModelPlan, name: str) -> bool:
    return name.endswith(_WEIGHT) and name.removesuffix(_WEIGHT) in plan.quantized


def _cache_scales(plan: ModelPlan, name: str) -> list[str]:
    return [
        scale
        for suffix, scale in _CACHED.items()
        if name.endswith(suffix) and name.removesuffix(suffix) in plan.attentions
    ]


def _unquantized(plan: ModelPlan, tensor: torch.Tensor, where: str) -> torch.Tensor:
    dtype = _unquantized_dtype(plan, tensor.dtype)
    return finite_in(tensor, dtype, where) if dtype.is_floating_point else tensor


def _unquantized_dtype(plan: ModelPlan, dtype: torch.dtype) -> torch.dtype:
    return plan.dtype if plan.dtype is not None and dtype.is_floating_point else dtype
