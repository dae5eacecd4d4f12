"""A `TargetConfig` from the metadata of a GGUF file."""

from __future__ import annotations

from typing import cast

import numpy as np

from dflash_trt.checkpoint.gguf_end_tokens import END_ROLES, ends_by_text
from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.checkpoint.rope import LARGEST_THETA, RopeConfig, RopeKind
from dflash_trt.checkpoint.sizes import LARGEST_INTEGER, LARGEST_NUMBER, LARGEST_SIZES
from dflash_trt.checkpoint.target import Architecture, TargetConfig
from dflash_trt.errors import UserError

_ARCHITECTURES: dict[str, Architecture] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def target_config(file: GGUFFile) -> TargetConfig:
    """Read the config of a model of the `llama` or `qwen3` architecture.

    Numbers that GGUF stores in float32 come back as the shortest decimal that rounds to them, which is what
    the original config said (1e-05, not 9.999999747378752e-06). Where there is no `output.weight` the head
    is the embedding.

    Raises:
        UserError: a key is missing, or says something that is not supported.
    """
    architecture = read_architecture(file)
    for key in ("expert_count", "attention.sliding_window"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise file.error(f"{architecture}.{key}", "not supported; only dense models with full attention are")
    heads, kv_heads = read_head_counts(file)
    hidden_size = _size(file, f"{architecture}.embedding_length", "hidden_size")
    return TargetConfig(
        architecture=_ARCHITECTURES[architecture],
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=_size(file, f"{architecture}.feed_forward_length", "intermediate_size"),
        num_hidden_layers=_size(file, f"{architecture}.block_count", "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=(head_dim := _head_dim(file, hidden_size, heads)),
        rms_norm_eps=_decimal(file, f"{architecture}.attention.layer_norm_rms_epsilon", largest=1),
        max_position_embeddings=_size(file, f"{architecture}.context_length", "max_position_embeddings"),
        rope=_rope(file, architecture, head_dim),
        tie_word_embeddings=_HEAD not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=token_id(file, "bos"),
        eos_token_ids=end_token_ids(file),
    )


def read_architecture(file: GGUFFile) -> str:
    """`llama` or `qwen3`.

    Raises:
        UserError: it is another one.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise file.error("general.architecture", f"not supported; supported are {', '.join(_ARCHITECTURES)}")
    return architecture


def read_head_counts(file: GGUFFile) -> tuple[int, int]:
    """Query heads, and key and value heads, which are as many where the file does not say."""
    key = f"{read_architecture(file)}.attention.head_count"
    heads = _size(file, key, "num_attention_heads")
    kv_heads = _integer(file, f"{key}_kv") if f"{key}_kv" in file.metadata else heads
    if heads % kv_heads:
        raise file.error(f"{key}_kv", f"must divide {key}, {heads}")
    return heads, kv_heads


def token_id(file: GGUFFile, role: str) -> int | None:
    """The id of a special token (`bos`, `eos`, `eot`, `unknown`, `padding`), where the file has one."""
    key = f"tokenizer.ggml.{role}_token_id"
    return _integer(file, key, minimum=0, maximum=_vocab_size(file) - 1) if key in file.metadata else None


def end_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """The tokens that end a text, each once: `eos`, then others that the file names, then those known by their text."""
    named = (token_id(file, role) for role in END_ROLES)
    return tuple(dict.fromkeys([*(found for found in named if found is not None), *ends_by_text(file)]))


def _integer(file: GGUFFile, key: str, minimum: int = 1, maximum: int = LARGEST_INTEGER) -> int:
    value = file.metadata.get(key)
    if type(value) is not int or value < minimum:
        raise file.error(key, f"must be an integer, at least {minimum}")
    if value > maximum:
        raise file.error(key, f"must be at most {maximum}")
    return value


def _size(file: GGUFFile, key: str, name: str) -> int:
    return _integer(file, key, maximum=LARGEST_SIZES[name])


def _decimal(file: GGUFFile, key: str, largest: float = LARGEST_NUMBER) -> float:
    value = file.metadata.get(key)
    if not isinstance(value, float) or not 0 < value <= largest:
        raise file.error(key, f"must be a positive number, at most {largest:g}")
    return float(str(np.float32(value)))


def _vocab_size(file: GGUFFile) -> int:
    if _EMBEDDING not in file.tensors:
        raise file.error(_EMBEDDING, "is not among the tensors")
    shape = file.tensors[_EMBEDDING].shape
    if len(shape) != 2 or shape[0] > LARGEST_SIZES["vocab_size"]:
        raise file.error(_EMBEDDING, f"has shape {list(shape)}; it must have a row for each token")
    rows = shape[0]
    key = f"{read_architecture(file)}.vocab_size"
    if key in file.metadata and file.metadata[key] != rows:
        raise file.error(key, f"differs from the {rows} rows of {_EMBEDDING}")
    return rows


def _head_dim(file: GGUFFile, hidden_size: int, heads: int) -> int:
    """`attention.key_length`, or hidden size / heads; all of it must be rotated."""
    architecture = read_architecture(file)
    key = f"{architecture}.attention.key_length"
    if key in file.metadata:
        head_dim = _size(file, key, "head_dim")
    elif hidden_size % heads:
        raise file.error(f"{architecture}.embedding_length", f"must be a multiple of the {heads} heads")
    else:
        head_dim = hidden_size // heads
    for other in (f"{architecture}.attention.value_length", f"{architecture}.rope.dimension_count"):
        if other in file.metadata and file.metadata[other] != head_dim:
            raise file.error(other, f"must be the width of a head, {head_dim}")
    if head_dim % 2:
        raise file.error(key, f"must be even for a rotary embedding, not {head_dim}")
    return head_dim


def _rope(file: GGUFFile, architecture: str, head_dim: int) -> RopeConfig:
    """llama.cpp's scaling types `none`, `linear` and `yarn`, the latter with its published band."""
    theta = _decimal(file, f"{architecture}.rope.freq_base", LARGEST_THETA)
    prefix = f"{architecture}.rope.scaling."
    kind = file.metadata.get(prefix + "type", "none")
    # `finetuned` records how the model was made; it changes no number.
    understood = {prefix + "type", prefix + "finetuned"}
    if kind in ("linear", "yarn"):
        understood.add(prefix + "factor")
    elif kind != "none":
        raise file.error(prefix + "type", "not supported; supported are none, linear and yarn")
    if kind == "yarn":
        understood.add(prefix + "original_context_length")
    for key in file.metadata:
        scales = key.startswith(prefix) or key == f"{architecture}.rope.scale_linear"
        if scales and key not in understood:
            raise file.error(key, f"not supported with rope scaling of type {kind}")
    original = _integer(file, prefix + "original_context_length") if kind == "yarn" else None
    factor = 1.0 if kind == "none" else _decimal(file, prefix + "factor")
    try:
        return RopeConfig(cast(RopeKind, "default" if kind == "none" else kind), theta, head_dim, factor, original)
    except UserError as error:
        raise UserError(f"{file.path}: {error}") from None
