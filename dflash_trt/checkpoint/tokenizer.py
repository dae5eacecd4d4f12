"""The tokenizer, chat template and generation defaults of a target, copied to where they will be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.gguf_config import end_token_ids, token_id
from dflash_trt.checkpoint.gguf_file import GGUFFile, find_gguf
from dflash_trt.checkpoint.gguf_tokenizer import read_tokenizer
from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.target import CONFIG_FILE, GENERATION_CONFIG_FILE
from dflash_trt.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_GGUF_CHAT_TEMPLATE = "tokenizer.chat_template"
_GGUF_SPECIAL_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def save_tokenizer(source: Path, destination: Path) -> None:
    """Write what `transformers.AutoTokenizer` needs to load a target's tokenizer, without the target.

    Writes `tokenizer.json` and `tokenizer_config.json`; `chat_template.jinja` where the source has a
    template, wherever it keeps it; and `generation_config.json`, the source's own or, where it has none, one
    with the begin and end tokens that its config names. Files of a Hugging Face directory are copied as
    they are; those of a GGUF file are built from its metadata.

    Args:
        source: a Hugging Face directory, a GGUF file, or a directory that holds exactly one.
        destination: a directory, made where it does not exist.

    Raises:
        UserError: the source has no tokenizer, or one that is not supported.
    """
    source, destination = Path(source), Path(destination)
    gguf_path = find_gguf(source)
    destination.mkdir(parents=True, exist_ok=True)
    if gguf_path is None:
        _copy(source, destination)
    else:
        _build(GGUFFile(gguf_path), destination)


def _copy(source: Path, destination: Path) -> None:
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        if not (source / name).is_file():
            raise UserError(
                f"{source / name}: no such file; write it with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    optional = (SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE, GENERATION_CONFIG_FILE)
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, *optional):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    if not (source / CHAT_TEMPLATE_FILE).is_file():
        template = _template_of(JsonObject.from_file(source / TOKENIZER_CONFIG_FILE))
        if template is not None:
            (destination / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    if not (source / GENERATION_CONFIG_FILE).is_file() and (source / CONFIG_FILE).is_file():
        config = JsonObject.from_file(source / CONFIG_FILE)
        found = {key: config.values[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        if found:
            _write_json(destination / GENERATION_CONFIG_FILE, found)


def _template_of(tokenizer_config: JsonObject) -> str | None:
    """The template of a file older than `chat_template.jinja`: a string, or a list of named ones."""
    templates = tokenizer_config.values.get("chat_template")
    if not isinstance(templates, list):
        return tokenizer_config.text("chat_template") if templates is not None else None
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return str(entry["template"])
    raise UserError(f"{tokenizer_config.path}: chat_template names {len(templates)} templates, none of them default")


def _build(file: GGUFFile, destination: Path) -> None:
    tokenizer = read_tokenizer(file)
    tokenizer.save(str(destination / TOKENIZER_FILE))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _GGUF_SPECIAL_TOKENS.items():
        index = token_id(file, role)
        if index is not None:
            config[key] = tokenizer.id_to_token(index)
    _write_json(destination / TOKENIZER_CONFIG_FILE, config)
    if _GGUF_CHAT_TEMPLATE in file.metadata:
        template = str(file.metadata[_GGUF_CHAT_TEMPLATE])
        (destination / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    ids = {"bos_token_id": token_id(file, "bos"), "eos_token_id": list(end_token_ids(file))}
    found = {key: value for key, value in ids.items() if value not in (None, [])}
    if found:
        _write_json(destination / GENERATION_CONFIG_FILE, found)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
