"""The tensors of a GGUF file under their Hugging Face names, unpacked one at a time."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dflash_trt.checkpoint.gguf_config import read_architecture, read_head_counts
from dflash_trt.checkpoint.gguf_file import GGUFFile, GGUFTensor
from dflash_trt.errors import UserError

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")

_UNQUANTIZED = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFWeights:
    """A `Weights` over a GGUF file of the `llama` or `qwen3` architecture.

    F32, F16 and BF16 tensors are returned in their own type and mapped; quantized ones are dequantized to
    float32. llama.cpp interleaves the rows of `llama`'s q and k for its rotary embedding; here they are in
    Hugging Face's order.

    Raises:
        UserError: another architecture, a tensor that it has no name for, or a type that cannot be unpacked.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.path = file.path
        self._file = file
        self._interleaved_heads: dict[str, int] = {}
        if read_architecture(file) == "llama":
            heads, kv_heads = read_head_counts(file)
            self._interleaved_heads = {"attn_q": heads, "attn_k": kv_heads}
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in file.tensors.values():
            self._tensors[_hugging_face_name(tensor.name, file.path)] = tensor
        for kind in sorted({tensor.type for tensor in file.tensors.values()}):
            if not _can_unpack(kind):
                name = next(tensor.name for tensor in file.tensors.values() if tensor.type == kind)
                raise UserError(f"{file.path}: tensor {name} has type {kind.name}, which cannot be dequantized")

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _UNQUANTIZED.get(self._tensor(name).type, torch.float32)

    def file_of(self, name: str) -> Path:
        del name  # one file holds them all
        return self.path

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        packed = self._file.bytes_of(tensor.name)
        if tensor.type in _UNQUANTIZED:
            values = torch.from_numpy(packed).view(_UNQUANTIZED[tensor.type]).reshape(tensor.shape)
        else:
            rows = packed.reshape(*tensor.shape[:-1], -1)
            values = torch.from_numpy(gguf.dequantize(rows, tensor.type)).reshape(tensor.shape)
        heads = self._interleaved_heads.get(tensor.name.split(".")[-2])
        return values if heads is None else _deinterleave(values, heads)

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path}: has no tensor {name}")
        return self._tensors[name]


def _hugging_face_name(name: str, path: Path) -> str:
    if (layer := _LAYER_NAME.fullmatch(name)) and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    if (top := _TOP_NAME.fullmatch(name)) and top[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[top[1]]}.{top[2]}"
    if name == "rope_freqs.weight":
        raise UserError(
            f"{path}: scales its rotary embedding by the table {name}, which is not supported; "
            "use the Hugging Face checkpoint, whose config says how"
        )
    raise UserError(f"{path}: tensor {name} is not part of a dense Llama or Qwen3 model")


def _can_unpack(kind: GGMLQuantizationType) -> bool:
    if kind in _UNQUANTIZED:
        return True
    try:
        gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _deinterleave(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from pairs (x0, y0, x1, y1, ...) to halves (x0, x1, ..., y0, y1, ...)."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
