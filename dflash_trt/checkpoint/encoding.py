"""Texts and conversations as token ids, by a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from dflash_trt.errors import UserError

Message = dict[str, Any]
"""A turn of a conversation: "role", "content", and what else the chat template reads."""


def encode_text(
    tokenizer: PreTrainedTokenizerFast, text: str, where: str, *, add_special_tokens: bool = True
) -> list[int]:
    """The ids of a text as it is.

    Args:
        tokenizer: the model's.
        text: any text.
        where: what a refusal names: a file and line, a prompt.
        add_special_tokens: those that the tokenizer puts around texts.

    Raises:
        UserError: the text holds a surrogate, which is no character.
    """
    return _encode(tokenizer, text, where, add_special_tokens=add_special_tokens)


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    where: str,
    /,
    *,
    add_generation_prompt: bool,
    **template_arguments: Any,
) -> list[int]:
    """The ids of a conversation in the words of the chat template, which writes its own special tokens.

    Args:
        tokenizer: the model's.
        messages: at least one.
        where: as in `encode_text`.
        add_generation_prompt: end where the assistant is to answer.
        template_arguments: what else the template takes.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages, or they are none.
    """
    if tokenizer.chat_template is None:
        raise UserError(f"{where}: the model has no chat template; give plain text")
    if not _are_messages(messages):
        raise UserError(f"{where}: a conversation needs messages, each with a role and a text as its content")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments
        )
    except TemplateError as error:
        raise UserError(f"{where}: the chat template refuses the messages: {error}") from None
    return _encode(tokenizer, str(text), where, add_special_tokens=False)


def _are_messages(messages: object) -> bool:
    return (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(
            isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        )
    )


def _encode(tokenizer: PreTrainedTokenizerFast, text: str, where: str, *, add_special_tokens: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text holds {error.object[error.start]!a} at {error.start}, which is no character; give UTF-8"
        ) from None
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))
