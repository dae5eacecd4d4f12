"""A client's messages as the prompt that the engine's chat template makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.encoding import DroppedByTemplate, encode_conversation
from dflash_trt.errors import UserError
from dflash_trt.serving.chat_protocol import ChatMessage
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.template_messages import template_messages

_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) - {"kwargs"} | {
    "messages",
    "where",
}
"""Names that mean something else than a variable of the template."""


def encode_messages(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    template_variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation.

    Args:
        add_generation_prompt: end where the assistant is to answer.
        template_variables: what else the chat template reads.
        tools: what it shows the model of tools.

    Raises:
        UserError: there is no chat template, or it cannot make a prompt of this, or drops part of it.
    """
    variables = template_variables or {}
    for name in variables.keys() & _RESERVED:
        raise UserError(f"chat_template_kwargs.{name} is not the client's to give")
    read = template_messages([message.model_dump(exclude_none=True) for message in messages])
    try:
        return encode_conversation(
            tokenizer, read, "messages", add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )
    except DroppedByTemplate as error:
        raise InvalidField(f"messages[{error.index}].{error.part}", error.problem) from None
