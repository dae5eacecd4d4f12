"""Tiny random checkpoints in the formats that users bring, made with transformers and the authors' dflash package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def random_target(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """Save a target with sharp enough logits that greedy decoding wanders, and return transformers' model of it."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, "tie_word_embeddings": False, **overrides})
    config._attn_implementation = "eager"
    model = model_class(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    model.save_pretrained(directory)
    save_tokenizer(directory, config.vocab_size)
    return model


def random_drafter(
    directory: Path,
    target: Any,
    seed: int = 1,
    block_size: int = 4,
    target_layer_ids: tuple[int, ...] = (0, 2),
    **overrides: Any,
) -> DFlashDraftModel:
    """Save a drafter for `target` in z-lab's format and return the authors' model of it."""
    torch.manual_seed(seed)
    values = {
        **{key: getattr(target.config, key) for key in SIZES if key not in ("bos_token_id", "eos_token_id")},
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "num_target_layers": target.config.num_hidden_layers,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": list(target_layer_ids)},
        "tie_word_embeddings": False,
        **overrides,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **values})
    )
    model = DFlashDraftModel(Qwen3Config(**values)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    save_file(model.state_dict(), directory / "model.safetensors")
    return model


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one printable character a token, so that any ids decode."""
    alphabet = {token: index for index, token in enumerate(["<s>", "</s>", "<mask>"])}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        if len(alphabet) == vocab_size:
            break
        alphabet[character] = len(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[], unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
