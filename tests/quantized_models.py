"""Tiny quantized checkpoints, targets as ModelOpt exports them, and what they compute by the formats' definitions.

The reference models are those of transformers and of the authors' dflash package, in float64: their weights are
dequantized, and hooks quantize and dequantize what goes into a linear layer and into a cache. Nothing here calls this
package's own arithmetic.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import torch.nn.functional as F
from dflash.model import DFlashDraftModel
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Qwen3Config

from dflash_trt.checkpoint.quantization_config import QuantAlgo, QuantizationConfig
from dflash_trt.quantization.fp8 import fp8_scale, quantize_fp8
from dflash_trt.quantization.nvfp4 import nvfp4_scale_2, quantize_nvfp4
from tests.tiny_models import random_drafter, random_target

FILE = "model.safetensors"
PRESETS: dict[QuantAlgo, str] = {
    "FP8": "FP8_DEFAULT_CFG",
    "NVFP4": "NVFP4_DEFAULT_CFG",
    "W4A16_NVFP4": "W4A16_NVFP4_CFG",
}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def quantized_target(
    directory: Path, algo: QuantAlgo, *, fp8_cache: bool = False, family: str = "llama", **overrides: Any
) -> Any:
    """Save `random_target` as ModelOpt quantizes and exports it; its unquantized model, as `random_target` returns it."""
    model = random_target(directory, family, **overrides)
    unquantized = copy.deepcopy(model)
    model.config.dtype = torch.float32  # saving has made it a string
    preset = copy.deepcopy(getattr(mtq, PRESETS[algo]))
    if fp8_cache:
        preset["quant_cfg"] = [*preset["quant_cfg"], *mtq.FP8_KV_CFG["quant_cfg"]]
    tokens = torch.randint(3, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mtq.quantize(model, preset, lambda model: model(tokens))
    export_hf_checkpoint(model, export_dir=directory)
    return unquantized


def quantized_drafter(
    directory: Path, target: Any, algo: QuantAlgo | None, *, fp8_cache: bool = False, **overrides: Any
) -> None:
    """Save `random_drafter` with all but `fc` quantized, as quantizers of drafters leave it; or none of it."""
    random_drafter(directory, target, **overrides)
    if algo or fp8_cache:
        _quantize_drafter(directory, QuantizationConfig(algo, "FP8" if fp8_cache else None, ("fc",) if algo else ()))


def _quantize_drafter(directory: Path, quantization: QuantizationConfig) -> None:
    """Quantize a saved drafter, with scales that fit what random ones of this size compute."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / FILE).items():
        module = name.removesuffix(".weight")
        algo = quantization.algo_of(module) if tensor.ndim == 2 else None
        if algo is None:
            tensors[name] = tensor
            continue
        packed = quantize_fp8(tensor, name) if algo == "FP8" else quantize_nvfp4(tensor, name)
        tensors |= {f"{module}.{field}": value for field, value in packed._asdict().items()}
        if quantization.quantizes_activations:
            tensors[f"{module}.input_scale"] = (fp8_scale if algo == "FP8" else nvfp4_scale_2)(torch.tensor(6.0))
    config = json.loads((directory / "config.json").read_text())
    if quantization.kv_cache_quant_algo:
        for layer in range(config["num_hidden_layers"]):
            for part in "kv":
                tensors[f"layers.{layer}.self_attn.{part}_proj.{part}_scale"] = fp8_scale(torch.tensor(3.0))
    save_file(tensors, directory / FILE)
    config["quantization_config"] = quantization.to_quantization_config()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "hf_quant_config.json").write_text(json.dumps(quantization.to_hf_quant_config()))


def reference_target(directory: Path) -> nn.Module:
    """transformers' model of a quantized target."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return _reference(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), directory)


def reference_drafter(directory: Path) -> DFlashDraftModel:
    """The authors' model of a quantized drafter."""
    values = json.loads((directory / "config.json").read_text())
    values.pop("quantization_config", None)
    return _reference(DFlashDraftModel(Qwen3Config(**values)), directory)


def _reference(model: Any, directory: Path) -> Any:
    tensors = load_file(directory / FILE)
    weights = {name: _dequantized(name, tensors) for name in tensors if not name.endswith(("_scale", "_scale_2"))}
    model = model.double().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # which is the embedding where it is tied
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RMSNorm"):  # theirs computes in float32
            module.forward = lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon)
        scale = tensors.get(f"{name}.input_scale")
        if scale is not None:
            fake = fake_fp8 if tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn else fake_nvfp4
            module.register_forward_pre_hook(lambda _, inputs, fake=fake, scale=scale: (fake(inputs[0], scale),))
    return model


def _dequantized(name: str, tensors: dict[str, Tensor]) -> Tensor:
    weight, scale = tensors[name], tensors.get(f"{name}_scale")
    if scale is None:
        return weight.double()
    if weight.dtype == torch.float8_e4m3fn:
        return weight.double() * scale.double()
    shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
    packed = NVFP4QTensor(shape, torch.float32, weight)
    return packed.dequantize(scale=scale, double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16}).double()


def fake_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """e4m3(clip(x / scale)) * scale, what is rounded in float32."""
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def fake_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest e2m1 value times e4m3(block amax / (6 * scale)) * scale, block by block of 16."""
    blocks = x.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    block_scale = (amax / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn).float() * scale
    nearest = (blocks / block_scale).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    return (E2M1[nearest].float() * block_scale).double().flatten(-2)


class FakeFP8Cache(DynamicCache):
    """transformers' cache, of keys and values that were FP8 in a checkpoint's scales, times these in float32.

    `prefix` names its layers.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        super().__init__()
        self._scales = load_file(directory / FILE)
        self._prefix = prefix

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        attention = f"{self._prefix}layers.{layer_idx}.self_attn"
        key_states = fake_fp8(key_states, self._scales[f"{attention}.k_proj.k_scale"])
        value_states = fake_fp8(value_states, self._scales[f"{attention}.v_proj.v_scale"])
        key_states, value_states = (part.float().double() for part in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
