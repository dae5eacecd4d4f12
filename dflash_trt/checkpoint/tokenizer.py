"""The tokenizer, chat template and generation defaults of a target, copied to where they will be served."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
TEMPLATES_DIR = "additional_chat_templates"
"""Holds templates that have other names than "default"; transformers takes "tool_use" where tools are offered."""
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
)
"""All that may be copied, beside what `TEMPLATES_DIR` holds."""
_LARGEST = 256 << 20
"""Bytes of one of them; vocabularies of 256,000 tokens take 35 million."""
_MOST_HOLES = 1 << 16
"""Ids that a vocabulary may pass over."""

_TEMPLATE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_GGUF_CHAT_TEMPLATE = "tokenizer.chat_template"
_GGUF_SPECIAL_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


def tokenizer_files(source: Path) -> dict[str, bytes]:
    """What `transformers.AutoTokenizer` needs to load a target's tokenizer without the target, by path.

    Always `tokenizer.json` and `tokenizer_config.json`; `chat_template.jinja` where the source has a template, wherever
    it keeps it, and `additional_chat_templates/NAME.jinja` where it has more; and `generation_config.json`, the
    source's own or, where it has none, one with the begin and end tokens that its config names. Files of a Hugging Face
    directory are taken as they are; those of a GGUF file are built from its metadata.

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
        write_files(destination, files)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their paths in a directory, with the folders that they need."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def load_tokenizer(directory: Path, origin: Path | None = None) -> PreTrainedTokenizerFast:
    """Load what `save_tokenizer` wrote.

    tokenizer.json decides how text becomes ids and ids become text, as `tokenizers.Tokenizer.from_file` has it. Of
    tokenizer_config.json come the names of special tokens, the chat template, and tokens that tokenizer.json lacks, but
    not `tokenizer_class`: transformers builds the pre-tokenizer and the decoder of that class instead of the file's.

    Args:
        directory: where it is.
        origin: what a refusal names instead, where `directory` is a copy.

    Raises:
        UserError: a file is missing or damaged, or its decoder is not supported.
    """
    for name in TOKENIZER_FILES:
        is_file(directory / name)  # refuses what waits when it is opened
    # Takes seconds, which ranks without a tokenizer save.
    from transformers import PreTrainedTokenizerFast

    from dflash_trt.checkpoint.token_bytes import require_decoder

    try:
        _check_ids(json.loads((directory / TOKENIZER_FILE).read_bytes()))
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            directory,
            local_files_only=True,
            # Both change what tokenizer.json says; the second is warned of where it is not refused.
            clean_up_tokenization_spaces=False,
            fix_mistral_regex=False,
            **_added_tokens(directory),
        )
        tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=True)  # only use shows some wrong types
    except Exception as error:  # tokenizers raises nothing narrower, transformers whatever a wrong type leads to
        reason = f"{type(error).__name__}: {error}".splitlines()[0].replace(str(directory), str(origin or directory))
        raise UserError(f"{origin or directory}: its tokenizer cannot be loaded ({reason})") from None
    try:
        require_decoder(tokenizer)
    except UserError as error:
        raise UserError(f"{(origin or directory) / TOKENIZER_FILE}: {error}") from None
    return tokenizer


def _added_tokens(directory: Path) -> dict[str, Any]:
    """Where tokenizer_config.json has added tokens, whose flags transformers would take: tokenizer.json's instead, and
    those that only the former has."""
    given = json.loads((directory / TOKENIZER_CONFIG_FILE).read_bytes()).get("added_tokens_decoder")
    if given is None:
        return {}
    stored = json.loads((directory / TOKENIZER_FILE).read_bytes())["added_tokens"]
    texts = {token["content"] for token in stored}
    others = {int(index): token for index, token in given.items() if token["content"] not in texts}
    return {"added_tokens_decoder": others | {token.pop("id"): token for token in stored}}


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
    for path in sorted((source / TEMPLATES_DIR).glob("*.jinja")):
        files[_template_file(path.stem, path)] = read_file(path, _LARGEST)
    if not any(name.endswith(".jinja") for name in files):
        files |= _templates_of(JsonObject.from_file(source / TOKENIZER_CONFIG_FILE))
    elif CHAT_TEMPLATE_FILE not in files:
        raise UserError(f"{source / CHAT_TEMPLATE_FILE}: no such file, beside {TEMPLATES_DIR}; it is the default")
    if GENERATION_CONFIG_FILE not in files and is_file(source / CONFIG_FILE):
        config = JsonObject.from_file(source / CONFIG_FILE)
        found = {key: config.values[key] for key in ("bos_token_id", "eos_token_id") if key in config}
        if found:
            files[GENERATION_CONFIG_FILE] = _json(found)
    return files


def _templates_of(tokenizer_config: JsonObject) -> dict[str, bytes]:
    """The templates of a file older than `chat_template.jinja`, a string or a list of named ones, as files."""
    templates = tokenizer_config.values.get("chat_template")
    if templates is None:
        return {}
    if not isinstance(templates, list):
        return {CHAT_TEMPLATE_FILE: tokenizer_config.text("chat_template").encode()}
    files = {}
    for entry in templates:
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise UserError(
                f"{tokenizer_config.path}: chat_template must be a text, or list a name and a template each"
            )
        files[_template_file(name, tokenizer_config.path)] = template.encode()
    if CHAT_TEMPLATE_FILE not in files:
        raise UserError(
            f"{tokenizer_config.path}: chat_template names {len(templates)} templates, none of them default"
        )
    return files


def _template_file(name: str, where: Path) -> str:
    if not _TEMPLATE_NAME.fullmatch(name):
        raise UserError(f"{where}: a chat template is called {name!r}; its name must be letters, digits, _, - and dots")
    return CHAT_TEMPLATE_FILE if name == "default" else f"{TEMPLATES_DIR}/{name}.jinja"


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
    for key, template in file.metadata.items():
        if key == _GGUF_CHAT_TEMPLATE or key.startswith(f"{_GGUF_CHAT_TEMPLATE}."):
            name = key.removeprefix(_GGUF_CHAT_TEMPLATE).removeprefix(".") or "default"
            files[_template_file(name, file.path)] = str(template).encode()
    if CHAT_TEMPLATE_FILE not in files and any(name.endswith(".jinja") for name in files):
        raise file.error(_GGUF_CHAT_TEMPLATE, "is required, beside templates of other names; it is the default")
    ids = {"bos_token_id": token_id(file, "bos"), "eos_token_id": list(end_token_ids(file))}
    found = {key: value for key, value in ids.items() if value not in (None, [])}
    if found:
        files[GENERATION_CONFIG_FILE] = _json(found)
    return files


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
