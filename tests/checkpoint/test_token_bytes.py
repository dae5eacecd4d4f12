"""The bytes of tokens, together those of the text that they encode."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.token_bytes import token_bytes

TEXTS = ["hello there", "K\u00f6ln \U0001f600", "a\n\tb  c"]


def byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate([*alphabet, "he"])}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentencepiece(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {text: 256 + index for index, text in enumerate(["<unk>", "\u2581", "h", "e", "l", "o", "he"])}
    model = models.BPE(vocabulary, [("h", "e")], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


REPLACING = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
SPACED = decoders.Sequence([decoders.Metaspace(prepend_scheme="never"), decoders.ByteFallback()])


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), sentencepiece(REPLACING), sentencepiece(SPACED)], ids=["bytes", "replace", "metaspace"]
)
def test_bytes_of_tokens_make_up_their_text(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), "\uff5cend\uff5c"])
    texts = token_bytes(tokenizer)
    assert len(texts) == len(tokenizer)
    assert texts[tokenizer.convert_tokens_to_ids("<|end|>")] == b"<|end|>"
    for text in [*TEXTS, "an \uff5cend\uff5c"]:
        assert b"".join(texts[token] for token in tokenizer.encode(text, add_special_tokens=False)).decode() == text
