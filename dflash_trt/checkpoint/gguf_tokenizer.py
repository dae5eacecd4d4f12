"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

It is built here because transformers' own conversion loses what `tokenizer.ggml.pre` names: how text is cut
before the merges apply (for SmolLM2, each digit by itself).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from dflash_trt.checkpoint.gguf_config import token_id
from dflash_trt.checkpoint.gguf_file import GGUFFile
from dflash_trt.errors import UserError

_Item = TypeVar("_Item", str, int)

# The published pattern of both families; Llama 3 takes digits by threes, Qwen by ones.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _smollm() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _smollm,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        UserError: a kind of tokenizer, or a way of cutting text, that is not supported.
    """
    metadata = file.metadata
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise file.error("tokenizer.ggml.model", 'only "gpt2", byte-level BPE, is supported')
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise file.error("tokenizer.ggml.pre", f"not supported; supported are {', '.join(_PRE_TOKENIZERS)}")
    for flag in ("add_space_prefix", "add_eos_token"):
        if metadata.get(f"tokenizer.ggml.{flag}"):
            raise file.error(f"tokenizer.ggml.{flag}", "not supported")

    tokens = _list(file, "tokenizer.ggml.tokens", str)
    kinds = _list(file, "tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(file, "tokenizer.ggml.merges", str)]
    if len(kinds) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"must have one entry for each of {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        # Llama 3's vocabulary has words that its merges do not reach.
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"{file.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error})") from None
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[str(pre)]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for kind, special in ((TokenType.CONTROL, True), (TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, found in zip(tokens, kinds, strict=True)
                if found == kind
            ]
        )
    # Where the key is absent, llama.cpp adds the token for Llama 3 and for no other kind that is supported.
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = token_id(file, "bos")
        if bos is None:
            raise file.error("tokenizer.ggml.bos_token_id", "is required, because a text starts with that token")
        if bos >= len(tokens):
            raise file.error("tokenizer.ggml.bos_token_id", f"must be one of {len(tokens)} tokens")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0",
            pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _list(file: GGUFFile, key: str, kind: type[_Item]) -> list[_Item]:
    values = file.metadata.get(key)
    if not isinstance(values, list):
        raise file.error(key, "is required")
    return [value for value in values if isinstance(value, kind)]
