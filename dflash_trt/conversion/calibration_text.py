"""Texts that models are calibrated and measured with, as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.encoding import encode_conversation, encode_text
from dflash_trt.checkpoint.message_forms import Message
from dflash_trt.checkpoint.open_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.regular_file import check_file
from dflash_trt.errors import UserError, access

_KINDS = ("messages", "conversations", "prompt", "text")
_ANSWERS = ("completion", "response")
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


def read_samples(path: Path, tokenizer: PreTrainedTokenizerFast, size: int, max_length: int) -> list[list[int]]:
    """The first samples of a file, encoded as the model meets them in use.

    A `.jsonl` file has a JSON object a line, read by the first of these keys that it has:

    - `messages`, each with `role` and `content`: a whole conversation, in the model's own chat template;
    - `conversations`, each with `from` and `value`: the same as ShareGPT writes it;
    - `prompt`: a user's message and, where there is a `completion` or a `response`, the assistant's; where there is
      none, up to where the assistant answers;
    - `text`: as it is.

    A `.txt` file has paragraphs, set apart by blank lines, each taken as it is. What is empty is passed over.

    Args:
        path: the file, in UTF-8.
        tokenizer: the model's.
        size: samples to take, at most.
        max_length: tokens that are kept of a sample, at most.

    Returns:
        1 to `size` lists of 1 to `max_length` token ids.

    Raises:
        UserError: naming file and line: it is damaged, has none of the keys, or holds a conversation that the model's
            template refuses or that it has no template for. Or the file has another suffix, or nothing in it.
    """
    if path.suffix == ".jsonl":
        encoded = (_encode_row(tokenizer, row, where) for row, where in _rows(path))
    elif path.suffix == ".txt":
        encoded = (encode_text(tokenizer, text, where) for text, where in _paragraphs(path))
    else:
        raise UserError(f"{path}: texts are .jsonl, a JSON object a line, or .txt, paragraphs")
    samples = list(islice((ids[:max_length] for ids in encoded if ids), size))
    if not samples:
        raise UserError(f"{path}: holds no text")
    return samples


def check_samples(samples: list[list[int]], path: Path, target: TargetCheckpoint) -> None:
    """See that a target can be run on samples, which are those of a file.

    Raises:
        UserError: a token is outside the target's vocabulary, or a sample goes on past the positions that the target
            was trained for.
    """
    largest, vocab_size = max(map(max, samples)), target.config.vocab_size
    if largest >= vocab_size:
        raise UserError(
            f"{path}: holds the token {largest}, outside a vocabulary of {vocab_size}; the tokenizer of {target.path} "
            "is another model's"
        )
    longest, trained = max(map(len, samples)), target.config.max_position_embeddings
    if longest > trained:
        raise UserError(
            f"{path}: has a sample of {longest} tokens, above max_position_embeddings {trained} of {target.path}; cut "
            f"samples to {trained} with --calib_seq_len, or --report_seq_len where the text is held out"
        )


def _lines(path: Path) -> Iterator[tuple[str, int]]:
    check_file(path)
    with access(path, "read"), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8"), number
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: is not UTF-8 ({error.reason} at byte {error.start})") from None


def _paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    """Every paragraph, without the end of its last line, and where it begins."""
    for blank, lines in groupby(_lines(path), lambda line: not line[0].strip()):
        if not blank:
            (text, number), *rest = lines
            yield "".join((text, *(line for line, _ in rest))).rstrip("\r\n"), f"{path}:{number}"


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    for line, number in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: must be a JSON object, not {type(row).__name__}")
        yield row, where


def _encode_row(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], where: str) -> list[int]:
    kind = next((key for key in _KINDS if row.get(key) is not None), None)
    if kind is None:
        raise UserError(f"{where}: has none of the keys {', '.join(_KINDS)}")
    content = row[kind]
    if content == [] or (isinstance(content, str) and not content.strip()):
        return []
    if kind == "text":
        if not isinstance(content, str):
            raise UserError(f"{where}: text must be a string, not {type(content).__name__}")
        return encode_text(tokenizer, content, where)
    if kind == "prompt":
        answer = next((row[key] for key in _ANSWERS if row.get(key) is not None), None)
        messages = [{"role": "user", "content": content}]
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        return encode_conversation(tokenizer, messages, where, add_generation_prompt=answer is None)
    messages = content if kind == "messages" else _from_sharegpt(content, where)
    return encode_conversation(tokenizer, messages, where, add_generation_prompt=False)


def _from_sharegpt(turns: object, where: str) -> list[Message]:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where}: conversations must be a list of objects, each with from and value")
    return [{"role": _role(turn.get("from"), where), "content": turn.get("value")} for turn in turns]


def _role(speaker: object, where: str) -> str:
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise UserError(f"{where}: from is {speaker!r}; it must be one of {', '.join(_SHAREGPT_ROLES)}")
    return _SHAREGPT_ROLES[speaker]
