"""How large the numbers in a model's config may be: several times what any model has.

Beyond these a config is damaged or made up, and what it asks for could not be allocated, nor counted in time.
"""

from __future__ import annotations

from dflash_trt.errors import UserError

LARGEST_INTEGER = 2**31 - 1
"""Of any integer in a config that has no limit of its own."""
LARGEST_NUMBER = 1e6
"""Of factors on what a model computes."""
LARGEST_SIZES: dict[str, int] = {
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**12,
    "num_target_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "block_size": 2**10,
    "max_position_embeddings": LARGEST_INTEGER,
    "original_max_position_embeddings": LARGEST_INTEGER,
}


def check_sizes(config: object) -> None:
    """Refuse a config whose sizes no model has, wherever it comes from.

    Args:
        config: an object whose attributes have the names in `LARGEST_SIZES`; those that are None are passed over.

    Raises:
        UserError: naming the attribute.
    """
    for name, largest in LARGEST_SIZES.items():
        value = getattr(config, name, None)
        if value is not None and not 1 <= value <= largest:
            raise UserError(f"{name} is {value}, it must be 1 to {largest}")
