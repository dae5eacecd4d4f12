"""The tokens that end a generation by a GGUF file, which names few of them; llama.cpp knows the others by text."""

from __future__ import annotations

from gguf import TokenType

from dflash_trt.checkpoint.gguf_file import GGUFFile

END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Keys that name such a token: ends of texts, turns and messages; what stands between files ends one, too."""

_TEXT_ENDS = ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend▁of▁sentence\uff5c>")
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "< EOT >",
    "_<EOT>",
    "_< EOT >",
    "[EOT]",
)
_CHANNEL_ENDS = ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>")
_FILE_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "<|file_sep|>",
)
_ENDS = frozenset((*_TEXT_ENDS, *_TURN_ENDS, *_CHANNEL_ENDS, *_FILE_ENDS))


def ends_by_text(file: GGUFFile) -> list[int]:
    """Added tokens, control or user-defined, whose text is a known end, by id.

    In vocabularies with channels (gpt-oss's harmony for one) `<|end|>` ends a message of several, and no generation.
    """
    texts, kinds = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(texts, list) or not isinstance(kinds, list):
        return []
    added = (TokenType.CONTROL, TokenType.USER_DEFINED)
    found = {index: text for index, (text, kind) in enumerate(zip(texts, kinds, strict=False)) if kind in added}
    ends = {index: text for index, text in found.items() if text in _ENDS}
    if len(set(_CHANNEL_ENDS).intersection(ends.values())) > 1:
        ends = {index: text for index, text in ends.items() if text != "<|end|>"}
    return list(ends)
