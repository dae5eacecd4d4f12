"""The tokenizer, chat template and generation defaults of a target, copied to where they will be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash_trt.checkpoint.gguf_config import end_token_ids, token_id
from dflash_trt.checkpoint.gguf_file import GGUFFile, find_gguf
from dflash_trt.checkpoint.gguf_tokenizer import read_tokenizer
from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.regular_file import is_file, read_file
from dflash_trt.checkpoint.target import CONFIG_FILE, GENERATION_CONFIG_FILE
from dflash_trt.errors import UserError, access

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
)
"""All that may be copied."""
_LARGEST = 256 << 20
"""Bytes of one of them; vocabularies of 256,000 tokens take 35 million."""
_MOST_HOLES = 1 << 16
"""Ids that a vocabulary may pass over."""

_GGUF_CHAT_TEMPLATE = "tokenizer.chat_template"
_GGUF_SPECIAL_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """What `transformers.AutoTokenizer` needs to load a target's tokenizer without the target, by file name.

    Always `tokenizer.json` and `tokenizer_config.json`; `chat_template.jinja` where the source has a template,
    wherever it keeps it; and `generation_config.json`, the source's own or, where it has none, one with the begin
    and end tokens that its config names. Files of a Hugging Face directory are taken as they are; those of a GGUF
    file are built from its metadata.

    Args:
        source: a Hugging Face directory, a GGUF file, or a directory that holds exactly one.

    Raises:
        UserError: the source has no tokenizer, or one that is not supported.
    """
    gguf_path = find_gguf(source)
    return _stored(source) if gguf_path is None else _built(GGUFFile(gguf_path))


def save_tokenizer(source: Path, destination: Path) -> None:
    """Write `tokenizer_files` of `source` into a directory, made where it does not exist.

    Raises:
        UserError: as `tokenizer_files`, or a file cannot be written.
    """
    files = tokenizer_files(source)
    with access(destination, "written"):
        destination.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (destination / name).write_bytes(content)


def load_tokenizer(directory: Path, origin: Path | None = None) -> PreTrainedTokenizerFast:
    """Load what `save_tokenizer` wrote.

    Args:
        directory: where it is.
        origin: what a refusal names instead, where `directory` is a copy.

    Raises:
        UserError: a file is missing or damaged.
    """
    for name in TOKENIZER_FILES:
        is_file(directory / name)  # refuses what waits when it is opened
    from transformers import AutoTokenizer  # takes seconds, which ranks without a tokenizer save

    try:
        _check_ids(json.loads((directory / TOKENIZER_FILE).read_bytes()))
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=True)  # only use shows some wrong types
        return cast("PreTrainedTokenizerFast", tokenizer)
    except Exception as error:  # tokenizers raises nothing narrower, transformers whatever a wrong type leads to
        reason = f"{type(error).__name__}: {error}".splitlines()[0].replace(str(directory), str(origin or directory))
        raise UserError(f"{origin or directory}: its tokenizer cannot be loaded ({reason})") from None


def _check_ids(content: Any) -> None:
    """Refuse ids far beyond the number of tokens: tokenizers writes out every one that is missing below them."""
    vocabulary = content["model"].get("vocab") or []
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token["id"] for token in content.get("added_tokens") or ()]
    if max(ids, default=0) > len(ids) + _MOST_HOLES:
        raise ValueError(f"{TOKENIZER_FILE} has the token id {max(ids)} among {len(ids)} tokens")


def _stored(source: Path) -> dict[str, bytes]:
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        if not is_file(source / name):
            raise UserError(
                f"{source / name}: no such file; write it with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    files = {}
    for name in TOKENIZER_FILES:
        if is_file(source / name):
            files[name] = read_file(source / name, _LARGEST)
    if CHAT_TEMPLATE_FILE not in files:
        template = _template_of(JsonObject.from_file(source / TOKENIZER_CONFIG_FILE))
        if template is not None:
            files[CHAT_TEMPLATE_FILE] = template.encode()
    if GENERATION_CONFIG_FILE not in files and is_file(source / CONFIG_FILE):
        config = JsonObject.from_file(source / CONFIG_FILE)
        found = {key: config.values[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        if found:
            files[GENERATION_CONFIG_FILE] = _json(found)
    return files


def _template_of(tokenizer_config: JsonObject) -> str | None:
    """The template of a file older than `chat_template.jinja`: a string, or a list of named ones."""
    templates = tokenizer_config.values.get("chat_template")
    if not isinstance(templates, list):
        return tokenizer_config.text("chat_template") if templates is not None else None
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return str(entry["template"])
    raise UserError(f"{tokenizer_config.path}: chat_template names {len(templates)} templates, none of them default")


def _built(file: GGUFFile) -> dict[str, bytes]:
    tokenizer = read_tokenizer(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _GGUF_SPECIAL_TOKENS.items():
        index = token_id(file, role)
        if index is not None:
            config[key] = tokenizer.id_to_token(index)
    files = {TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode(), TOKENIZER_CONFIG_FILE: _json(config)}
    if _GGUF_CHAT_TEMPLATE in file.metadata:
        files[CHAT_TEMPLATE_FILE] = str(file.metadata[_GGUF_CHAT_TEMPLATE]).encode()
    ids = {"bos_token_id": token_id(file, "bos"), "eos_token_id": list(end_token_ids(file))}
    found = {key: value for key, value in ids.items() if value not in (None, [])}
    if found:
        files[GENERATION_CONFIG_FILE] = _json(found)
    return files


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
