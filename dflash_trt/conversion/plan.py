"""What a conversion makes of one model: the format of every layer, and the config that says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from dflash_trt.checkpoint.example_prompts import example_prompts_file
from dflash_trt.checkpoint.json_object import LARGEST_CONFIG, JsonObject
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.quantization_config import (
    NVFP4_GROUP_SIZE,
    QUANT_CONFIG_FILE,
    QUANTIZATION_KEY,
    QuantAlgo,
    QuantizationConfig,
)
from dflash_trt.checkpoint.regular_file import read_file
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.checkpoint.tokenizer import tokenizer_files
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest

QFormat = Literal["bf16", "fp8", "nvfp4", "w4a16_nvfp4"]
KVCacheQFormat = Literal["none", "fp8"]

_ALGOS: dict[QFormat, QuantAlgo] = {"fp8": "FP8", "nvfp4": "NVFP4", "w4a16_nvfp4": "W4A16_NVFP4"}
_QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)

ALWAYS_EXCLUDED = ("*lm_head", "*router*", "*.mlp.gate", "fc")
"""Heads, routers of experts and a drafter's fusion layer: small beside what quantizing them costs. ModelOpt leaves out
the same, and no other quantizer touches `fc`."""

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that take one input and that runtimes run as one matrix: they share `weight_scale_2` and `input_scale`."""


@dataclass(frozen=True)
class Formats:
    """What a user chooses for one model."""

    qformat: QFormat
    kv_cache_qformat: KVCacheQFormat = "none"
    exclude_modules: tuple[str, ...] = ()
    """Patterns of modules that stay as they are, beside `ALWAYS_EXCLUDED`."""


@dataclass(frozen=True)
class ModelPlan:
    """One model's conversion, checked against its headers.

    Attributes:
        weights: the source.
        quantization: what the result says of itself; None where nothing is quantized.
        quantized: modules whose weight is quantized.
        attentions: modules whose keys and values will be cached in FP8.
        dtype: type that floating tensors get which are not quantized; None where each keeps its own.
        files: everything but the weights, by name.
    """

    weights: Weights
    quantization: QuantizationConfig | None
    quantized: frozenset[str]
    attentions: frozenset[str]
    dtype: torch.dtype | None
    files: dict[str, bytes]

    @property
    def algo(self) -> QuantAlgo | None:
        """The format of the quantized modules."""
        return None if self.quantization is None else self.quantization.quant_algo

    @property
    def calibrated_inputs(self) -> frozenset[str]:
        """Modules of which the largest input has to be known."""
        calibrated = self.quantization is not None and self.quantization.quantizes_activations
        return self.quantized if calibrated else frozenset()

    @property
    def needs_calibration(self) -> bool:
        """Some scale can only be found by running the model."""
        return bool(self.calibrated_inputs or self.attentions)

    def fused_with(self, module: str) -> tuple[str, ...]:
        """The quantized modules that share scales with `module`, itself among them."""
        parent, _, own = module.rpartition(".")
        group = next((group for group in _FUSED if own in group), (own,))
        together = (f"{parent}.{name}" if parent else name for name in group)
        return tuple(name for name in together if name in self.quantized)


def plan_target(target: TargetCheckpoint, formats: Formats) -> ModelPlan:
    """Check what can be checked without reading weights.

    Raises:
        UserError: the checkpoint is damaged or quantized already, or the formats cannot be had.
    """
    _refuse_quantized(target.path, target.config.quantization)
    config = target.config.to_dict() if target.path.is_file() else _read_config(target.path)
    files = tokenizer_files(target.path)
    # A tied head is a module without a weight of its own; a loader that asks for its format must find it excluded.
    bare = ["lm_head"] if target.config.tie_word_embeddings else []
    return _plan(target_manifest(target), bare, config, files | _code(target.path), formats, "")


def plan_drafter(drafter: DrafterCheckpoint, formats: Formats) -> ModelPlan:
    """As `plan_target`, of a drafter."""
    _refuse_quantized(drafter.path, drafter.config.quantization)
    files = _code(drafter.path) | example_prompts_file(drafter.path)
    return _plan(drafter_manifest(drafter), [], _read_config(drafter.path), files, formats, "drafter_")


def _plan(
    manifest: Manifest,
    bare: Sequence[str],
    config: dict[str, Any],
    files: dict[str, bytes],
    formats: Formats,
    option: str,
) -> ModelPlan:
    """`option` is what the options for this model begin with."""
    quantized = _quantized(manifest, formats, option)
    attentions = frozenset(
        name.removesuffix(".k_proj")
        for name in manifest.linears
        if formats.kv_cache_qformat == "fp8" and name.endswith(".k_proj")
    )
    config = {key: value for key, value in config.items() if key != QUANTIZATION_KEY}  # which said that nothing is
    if formats.qformat == "bf16":
        config = {**config, _dtype_key(config): "bfloat16"}
    quantization = None
    if quantized or attentions:
        unquantized = {name.removesuffix(".weight") for name, shape in manifest.floats.items() if len(shape) == 2}
        quantization = QuantizationConfig(
            quant_algo=_ALGOS.get(formats.qformat),
            kv_cache_quant_algo="FP8" if attentions else None,
            exclude_modules=summarize({*bare, *unquantized} - {*quantized}, quantized) if quantized else (),
        )
        config = {**config, QUANTIZATION_KEY: quantization.to_quantization_config()}
        files = {**files, QUANT_CONFIG_FILE: _json(quantization.to_hf_quant_config())}
    return ModelPlan(
        weights=manifest.weights,
        quantization=quantization,
        quantized=quantized,
        attentions=attentions,
        dtype=torch.bfloat16 if formats.qformat == "bf16" else None,
        files={**files, CONFIG_FILE: _json(config)},
    )


def _quantized(manifest: Manifest, formats: Formats, option: str) -> frozenset[str]:
    """The linear layers that no pattern excludes, seen to be quantizable."""
    given = f"{option}exclude_modules {' '.join(formats.exclude_modules)}"
    if formats.qformat == "bf16":
        if formats.exclude_modules:
            raise UserError(f"{given}: {option}qformat bf16 quantizes no module")
        return frozenset()
    candidates = [module for module in manifest.linears if not _matches(module, ALWAYS_EXCLUDED)]
    for pattern in formats.exclude_modules:
        if not any(fnmatchcase(module, pattern) for module in manifest.linears):
            raise UserError(
                f"{option}exclude_modules {pattern}: matches no linear layer of {manifest.weights.path}; a layer is "
                f"named like {candidates[0]}"
            )
    quantized = frozenset(module for module in candidates if not _matches(module, formats.exclude_modules))
    if not quantized:
        raise UserError(
            f"{given}: leaves nothing of {manifest.weights.path} to quantize; give fewer patterns, or "
            f"--{option}qformat bf16"
        )
    for module in sorted(quantized):
        _check_quantizable(manifest.weights, module, formats.qformat, option)
    return quantized


def _matches(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def _check_quantizable(weights: Weights, module: str, qformat: QFormat, option: str) -> None:
    name = f"{module}.weight"
    where = f"{weights.file_of(name)}: tensor {name}"
    if weights.dtype(name) not in _QUANTIZABLE:
        dtype = str(weights.dtype(name)).removeprefix("torch.")
        raise UserError(
            f"{where} has type {dtype}; what can be quantized is float32, bfloat16 or float16: convert it with "
            f"--{option}qformat bf16 first, and what comes of that again"
        )
    columns = weights.shape(name)[-1]
    if qformat != "fp8" and columns % NVFP4_GROUP_SIZE:
        raise UserError(
            f"{where} has {columns} columns, no multiple of {NVFP4_GROUP_SIZE}, those that share a scale in NVFP4; "
            f"leave it out with --{option}exclude_modules '{module}', or give --{option}qformat fp8"
        )


def summarize(unquantized: Collection[str], quantized: Collection[str]) -> tuple[str, ...]:
    """The shortest list of names and prefixes that matches every unquantized module and no quantized one.

    Modules are gathered under the shortest dotted prefix that no quantized module shares: `model.layers.1*`, or
    `model.layers.1.*` where a quantized layer 10 has the same beginning. ModelOpt 0.47 writes the same list.
    """

    def shortest(name: str) -> str:
        for end in (index for index, character in enumerate(name) if character == "."):
            prefix = name[:end]
            if not any(other.startswith(prefix) for other in quantized):
                return f"{prefix}*"
            if not any(other == prefix or other.startswith(f"{prefix}.") for other in quantized):
                return f"{prefix}.*"
        return name

    return tuple(sorted({shortest(name) for name in unquantized}))


def _refuse_quantized(path: Path, found: QuantizationConfig | None) -> None:
    if found is not None and (found.quant_algo or found.kv_cache_quant_algo):
        what = found.quant_algo or f"a cache of {found.kv_cache_quant_algo}"
        raise UserError(f"{path}: is quantized already ({what}); give the checkpoint that it was made from")


def _read_config(directory: Path) -> dict[str, Any]:
    return dict(JsonObject.from_file(directory / CONFIG_FILE).values)


def _code(path: Path) -> dict[str, bytes]:
    """The Python files of a directory, which `auto_map` of its config names."""
    found = {}
    for file in sorted(path.glob("*.py")):
        found[file.name] = read_file(file, LARGEST_CONFIG)
    return found


def _dtype_key(config: dict[str, Any]) -> str:
    """transformers 5 writes `dtype`, transformers 4 `torch_dtype`."""
    return "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"


def _json(content: dict[str, Any]) -> bytes:
    """As ModelOpt writes it, to the byte."""
    return json.dumps(content, indent=4).encode()
