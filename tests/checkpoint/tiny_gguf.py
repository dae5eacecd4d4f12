"""Toy GGUF files, written with the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 32, 64, 2, 4, 2, 8


def metadata(architecture: str = "llama") -> dict[str, Any]:
    """The keys that a GGUF model must have."""
    return {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INTERMEDIATE,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tensors(architecture: str = "llama") -> dict[str, npt.NDArray[np.float32]]:
    """Every weight of the toy model, under its GGUF name."""
    random = np.random.default_rng(0)

    def weight(*shape: int) -> npt.NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32)

    found = {"token_embd.weight": weight(VOCAB, HIDDEN), "output_norm.weight": weight(HIDDEN)}
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.attn_norm.weight": weight(HIDDEN),
            f"blk.{layer}.attn_q.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm.weight": weight(HIDDEN),
            f"blk.{layer}.ffn_gate.weight": weight(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up.weight": weight(INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down.weight": weight(HIDDEN, INTERMEDIATE),
        }
        if architecture == "qwen3":
            found |= {f"blk.{layer}.attn_{name}_norm.weight": weight(HEAD_DIM) for name in "qk"}
    return found


def write(
    path: Path,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    changes: dict[str, Any] | None = None,
    extra: dict[str, npt.NDArray[np.float32]] | None = None,
) -> Path:
    """Write the toy model; a change to None drops that key. Matrices get `kind`, vectors stay F32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata(architecture) | (changes or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in (tensors(architecture) | (extra or {})).items():
        stored = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
