"""Texts and conversations as token ids, by a model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.chat_template import TemplateFailure, render
from dflash_trt.checkpoint.message_forms import Message, MessageForms, dropped, forms_of
from dflash_trt.errors import UserError


class DroppedByTemplate(UserError):
    """A chat template does not render a part of a message.

    Args:
        where: as in `encode_text`.
        index: of the message.
        part: its path in the message.
        role: of the message.
    """

    def __init__(self, where: str, index: int, part: str, role: str) -> None:
        self.problem = f"the model's chat template drops it from this message of role {role!r}"
        super().__init__(f"{where}: messages[{index}].{part}: {self.problem}")
        self.index = index
        self.part = part


def template_of(tokenizer: PreTrainedTokenizerFast, *, tools: bool) -> str | None:
    """The chat template of a conversation: of several, the one named "tool_use" if it exists and tools are offered."""
    if tokenizer.chat_template is None:
        return None
    return str(tokenizer.get_chat_template(tools=[] if tools else None))


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
    tools: Sequence[Mapping[str, Any]] | None = None,
    **template_arguments: Any,
) -> list[int]:
    """The ids of a conversation in the words of the chat template, which writes its own special tokens.

    Messages are given to the template in the forms that it renders (see `MessageForms`).

    Args:
        tokenizer: the model's.
        messages: at least one; content is text, arguments of calls are objects or text.
        where: as in `encode_text`.
        add_generation_prompt: end where the assistant is to answer.
        tools: what the template shows the model of tools.
        template_arguments: what else the template takes.

    Raises:
        DroppedByTemplate: the template does not render part of a message.
        UserError: the tokenizer has no chat template, the template refuses the messages, or they are none.
    """
    template = template_of(tokenizer, tools=tools is not None)
    if template is None:
        raise UserError(f"{where}: the model has no chat template; give plain text")
    if not _are_messages(messages):
        raise UserError(f"{where}: a conversation needs messages, each with a role and a text as its content")
    special = tokenizer.special_tokens_map
    taken = _forms(template, tuple(special.items()), tools is not None).apply(messages)
    variables = special | {"tools": tools, "add_generation_prompt": add_generation_prompt} | template_arguments
    try:
        text = render(template, [message for _, message in taken], **variables)
    except TemplateFailure as failure:
        raise UserError(f"{where}: {failure}") from None
    for index, part in dropped(partial(_rendered, template, variables), taken) or ():
        if part != "content" or not messages[index].get("tool_calls"):  # some drop it as they drop earlier reasoning
            raise DroppedByTemplate(where, index, part, messages[index]["role"])
    return _encode(tokenizer, text, where, add_special_tokens=False)


@lru_cache(maxsize=16)
def _forms(template: str, special_tokens: tuple[tuple[str, str], ...], tools: bool) -> MessageForms:
    shown = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    variables = {**dict(special_tokens), "tools": shown if tools else None, "add_generation_prompt": True}
    return forms_of(template, partial(_rendered, template, variables))


def _rendered(template: str, variables: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    try:
        return render(template, messages, **variables)
    except TemplateFailure:
        return None


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
