"""tokenizer.json decides, whatever class tokenizer_config.json names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from dflash_trt.checkpoint.special_tokens import textless_token_ids
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.conversion.calibration_text import read_samples
from dflash_trt.errors import UserError
from tests.tiny_tokenizers import MAKES, SPECIAL, byte_level, save

CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast", "Strange", None)
LEGACY = {"add_prefix_space": True, "legacy": True, "add_bos_token": True, "clean_up_tokenization_spaces": True}
TEXTS = (
    "The old  map, isn't it ?",
    " of 1234\n\n    return été 🦀 x",
    "<|im_start|>user\nThe map<|im_end|> <note>x <tool_call>",
    "</s>Clara<s>",
)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("name", CLASSES)
def test_ids_and_text_are_those_of_the_file(tmp_path: Path, make: str, name: str | None) -> None:
    truth = MAKES[make]()
    for config in ({}, LEGACY):
        tokenizer = load_tokenizer(save(truth, tmp_path, tokenizer_class=name, **config))
        for text in TEXTS:
            for special in (True, False):
                ids = truth.encode(text, add_special_tokens=special).ids
                assert tokenizer.encode(text, add_special_tokens=special) == ids
                assert tokenizer.decode(ids) == truth.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("make", MAKES)
def test_honest_files_are_as_transformers_loads_them(tmp_path: Path, make: str) -> None:
    directory = save(MAKES[make](), tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    tokenizer, expected = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.special_tokens_map == expected.special_tokens_map


def test_calibration_reads_the_same_ids(tmp_path: Path) -> None:
    truth = byte_level()
    tokenizer = load_tokenizer(save(truth, tmp_path / "model", tokenizer_class="LlamaTokenizerFast"))
    (tmp_path / "calibration.txt").write_text("\n\n".join(TEXTS[:1]))
    assert read_samples(tmp_path / "calibration.txt", tokenizer, 4, 100) == [truth.encode(TEXTS[0]).ids]


def test_flags_of_added_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    """The other file says otherwise of one, and has one more."""
    truth = byte_level()
    note = truth.token_to_id("<note>")
    other: dict[str, Any] = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": True, "special": True}
    added = {str(note): {"content": "<note>", **other}, "9999": {"content": "<more>", **other}}
    tokenizer = load_tokenizer(save(truth, tmp_path, added_tokens_decoder=added))
    assert tokenizer.encode(" <note> x") == truth.encode(" <note> x").ids
    assert note not in textless_token_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(truth.get_vocab_size()) == "<more>"


def test_special_tokens_that_only_the_old_file_names(tmp_path: Path) -> None:
    directory = save(byte_level(), tmp_path, bos_token=None, eos_token=None)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert load_tokenizer(directory).eos_token == "<|im_end|>"


def test_large_vocabularies_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers takes those beside a config.json without a version for Mistral's, and warns or replaces parts."""
    truth = Tokenizer(models.WordLevel({f"w{index}": index for index in range(100_001)}, unk_token="w0"))
    truth.pre_tokenizer = pre_tokenizers.Whitespace()
    truth.decoder = decoders.Fuse()
    directory = save(truth, tmp_path, unk_token="w0", bos_token=None, eos_token=None, fix_mistral_regex=True)
    (directory / "config.json").write_text("{}")
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        tokenizer = load_tokenizer(directory)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []
    assert tokenizer.encode("w7 w100000") == truth.encode("w7 w100000").ids == [7, 100_000]


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(), decoders.Sequence([decoders.Fuse(), decoders.CTC()])])
def test_refuses_decoders_whose_tokens_have_no_text_of_their_own(tmp_path: Path, decoder: Any) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    directory = save(tokenizer, tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json: decoder of type (BPEDecoder|CTC) is not supported"):
        load_tokenizer(directory)


def test_special_tokens_leave_no_text_but_for_tags(tmp_path: Path) -> None:
    """Also those that tokenizer_config.json does not name."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|reserved|>"), "<think>", "</think>", "</tool_call>", "<|python_tag|>"])
    loaded = load_tokenizer(save(tokenizer, tmp_path))
    texts = {loaded.convert_ids_to_tokens(token) for token in textless_token_ids(loaded)}
    assert texts == {*SPECIAL, "<|reserved|>"} - {"<tool_call>"}
