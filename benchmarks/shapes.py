"""The shapes that large checkpoints are made in."""

from __future__ import annotations

from transformers import Qwen3Config


def qwen3_8b(layers: int, vocab_size: int) -> Qwen3Config:
    """Qwen3-8B with another number of layers and tokens."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
