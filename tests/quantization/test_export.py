"""Whole checkpoints that ModelOpt exports, against the codecs."""

from __future__ import annotations

from pathlib import Path

import modelopt.torch.quantization as mtq
import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_trt.quantization.amax import tensor_amax
from dflash_trt.quantization.fp8 import quantize_fp8
from dflash_trt.quantization.nvfp4 import nvfp4_scale_2, quantize_nvfp4

LINEARS = {"self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}
SHARED = [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]


def export(directory: Path, preset: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of a random Llama of one layer, and what ModelOpt exports of it."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )
    model = LlamaForCausalLM(config).to(dtype)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    mtq.quantize(model, getattr(mtq, preset), lambda model: model(torch.arange(32)[None]))
    export_hf_checkpoint(model, export_dir=directory)
    return weights, load_file(directory / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"])
def test_every_linear_is_modelopts(tmp_path: Path, preset: str, dtype: torch.dtype) -> None:
    weights, exported = export(tmp_path, preset, dtype)
    for block, names in LINEARS.items():
        prefix = f"model.layers.0.{block}."
        for name in names:
            weight = weights[f"{prefix}{name}.weight"]
            if preset == "FP8_DEFAULT_CFG":
                ours = quantize_fp8(weight, name)._asdict()
            else:
                together = next((group for group in SHARED if name in group), {name})
                amaxes = [tensor_amax(weights[f"{prefix}{other}.weight"], other) for other in together]
                ours = quantize_nvfp4(weight, name, nvfp4_scale_2(torch.stack(amaxes).max()))._asdict()
            for field, tensor in ours.items():
                theirs = exported[f"{prefix}{name}.{field}"]
                assert tensor.dtype == theirs.dtype and tensor.shape == theirs.shape, f"{name}.{field}"
                assert torch.equal(tensor.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)), (
                    f"{name}.{field}"
                )
