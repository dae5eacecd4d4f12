"""GGUF tensors against the `gguf` package and transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dflash_trt.checkpoint.gguf_config import target_config
from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.checkpoint.gguf_weights import GGUFWeights
from dflash_trt.errors import UserError
from tests.checkpoint import tiny_gguf

UNQUANTIZED = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
TRANSFORMERS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
QUANTIZED = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]


@pytest.mark.parametrize("kind", [*UNQUANTIZED, *QUANTIZED])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_agrees_with_transformers(tmp_path: Path, architecture: str, kind: GGMLQuantizationType) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", architecture, kind)
    weights = GGUFWeights(GGUFFile(path))
    config = target_config(GGUFFile(path)).to_dict()
    model_class, config_class = TRANSFORMERS[architecture]
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model_class(config_class(**config)))
    theirs = loaded["tensors"]
    assert set(weights.names()) == set(theirs)
    for name in weights.names():
        tensor = weights.read(name)
        assert tensor.dtype == weights.dtype(name)
        assert tuple(tensor.shape) == weights.shape(name)
        assert torch.equal(tensor.float(), theirs[name])
    assert weights.dtype("model.layers.0.mlp.up_proj.weight") == UNQUANTIZED.get(kind, torch.float32)


def test_every_tensor_of_a_real_model(smollm2: GGUFFile) -> None:
    weights = GGUFWeights(smollm2)
    assert len(weights.names()) == 2 + 9 * 30
    assert sum(math.prod(weights.shape(name)) for name in weights.names()) == 134_515_008
    assert weights.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    assert weights.shape("model.layers.0.mlp.down_proj.weight") == (576, 1536)
    for name in weights.names():
        tensor = weights.read(name)
        assert tensor.dtype == torch.float32 and tuple(tensor.shape) == weights.shape(name)
        assert tensor.isfinite().all()


def test_interleaving_is_undone_for_biases_too(tmp_path: Path) -> None:
    """llama.cpp stores head rows as (x0, y0, x1, y1, ...)."""
    bias = np.arange(tiny_gguf.HEADS * tiny_gguf.HEAD_DIM, dtype=np.float32)
    path = tiny_gguf.write(tmp_path / "m.gguf", extra={"blk.0.attn_q.bias": bias})
    read = GGUFWeights(GGUFFile(path)).read("model.layers.0.self_attn.q_proj.bias")
    assert read[:8].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert read[8:16].tolist() == [8, 10, 12, 14, 9, 11, 13, 15]


def test_unquantized_tensors_are_mapped(tmp_path: Path) -> None:
    weights = GGUFWeights(GGUFFile(tiny_gguf.write(tmp_path / "m.gguf")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights.read(name).data_ptr() == weights.read(name).data_ptr()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("rope_freqs.weight", "scales its rotary embedding by the table rope_freqs.weight"),
        ("blk.0.ffn_gate_exps.weight", "tensor blk.0.ffn_gate_exps.weight is not part of a dense Llama"),
        ("something.weight", "tensor something.weight is not part of"),
    ],
)
def test_refuses_other_tensors(tmp_path: Path, tensor: str, message: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", extra={tensor: np.zeros(4, np.float32)})
    with pytest.raises(UserError) as refusal:
        GGUFWeights(GGUFFile(path))
    assert str(refusal.value).startswith(f"{path}: ") and message in str(refusal.value)


def test_refuses_a_type_that_cannot_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv"):
        writer.add_uint32(key, 1)
    writer.add_tensor("output_norm.weight", np.zeros(4, np.int16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"output_norm\.weight has type I16, which cannot be dequantized"):
        GGUFWeights(GGUFFile(path))


def test_refuses_an_unknown_name(smollm2: GGUFFile) -> None:
    with pytest.raises(UserError, match=r"has no tensor lm_head\.weight"):
        GGUFWeights(smollm2).read("lm_head.weight")
