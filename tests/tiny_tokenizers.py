"""Tokenizers of several makes, trained on a few lines, as checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import Model
from tokenizers.trainers import Trainer

LINES = [
    "The old map of Clara lies in the harbour of Oslo.",
    "def walk(x):\n    return x + 1",
    "12 34, isn't it? été",
] * 3
SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool_call>")


def _trained(model: Model, trainer: Trainer, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens(list(SPECIAL[3:]))
    tokenizer.add_tokens([AddedToken("<note>", normalized=False)])
    return tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen and Llama 3; texts begin with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=340, special_tokens=list(SPECIAL[:3]), initial_alphabet=alphabet, show_progress=False
        ),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        decoder=decoders.ByteLevel(),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece's of Llama 2 and Mistral."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = _trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL[:3], *pieces], show_progress=False),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    # Trained as special tokens so that they have places; a checkpoint has them as ordinary ones.
    stored = json.loads(trained.to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if each["content"] not in pieces]
    return Tokenizer.from_str(json.dumps(stored))


def metaspace() -> Tokenizer:
    """As newer conversions of SentencePiece."""
    return _trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=160, special_tokens=list(SPECIAL[:3]), show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"),
        decoder=decoders.Metaspace(prepend_scheme="first"),
    )


def word_piece() -> Tokenizer:
    """As BERT's."""
    return _trained(
        models.WordPiece(unk_token="<unk>"),
        trainers.WordPieceTrainer(vocab_size=160, special_tokens=list(SPECIAL[:3]), show_progress=False),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def word_level() -> Tokenizer:
    """Words with what stands for the space before them."""
    return _trained(
        models.WordLevel(unk_token="<unk>"),
        trainers.WordLevelTrainer(special_tokens=list(SPECIAL[:3]), show_progress=False),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Metaspace(),
    )


MAKES = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "word piece": word_piece,
    "word level": word_level,
}


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> Path:
    """Write it as a checkpoint has it; `config` goes to tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named | config))
    return directory
