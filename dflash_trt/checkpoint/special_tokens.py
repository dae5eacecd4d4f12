"""Which tokens of a vocabulary leave no text in an output."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
"""Texts by which reasoning and tool calls are told from content; some checkpoints flag them special."""


def textless_token_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids of special tokens that leave no text in an output.

    tokenizer.json decides what is special; tokenizer_config.json names only some of them (Llama 3 has 250 more). `TAGS`
    keep their text.
    """
    added = tokenizer.added_tokens_decoder
    special = {index for index, token in added.items() if token.special} | set(tokenizer.all_special_ids)
    return frozenset(index for index in special if index not in added or added[index].content not in TAGS)
