"""What a template does not make a prompt of is a mistake of the request, by the place of it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from dflash_trt.errors import UserError
from dflash_trt.serving.chat_protocol import ChatMessage
from dflash_trt.serving.conversation import encode_messages
from dflash_trt.serving.errors import ApiError
from tests.conftest import TINY
from tests.serving.templates import TEMPLATES

ASK = {"role": "user", "content": "Rain?"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}


@pytest.mark.parametrize(
    ("template", "messages", "param"),
    [
        (TEMPLATES["gptoss"], [ASK, {"role": "system", "content": "Be brief."}], "messages[1].content"),
        (TEMPLATES["chatml"], [ASK, {"role": "assistant", "tool_calls": [CALL]}], "messages[1].tool_calls[0]"),
        (TEMPLATES["gemma"], [{"role": "system", "content": "Be brief."}, ASK], "messages"),
        ("{{ messages[0].content | length / 0 }}", [ASK], "messages"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", [ASK], "messages"),
        ("{% include 'x' %}", [ASK], "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [ASK], "messages"),
    ],
)
def test_refusals_name_the_place(template: str, messages: list[dict[str, Any]], param: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)
    tokenizer.chat_template = template
    with pytest.raises(UserError) as refusal:
        encode_messages(tokenizer, [ChatMessage(**message) for message in messages], True, None)
    error = ApiError.of(refusal.value)
    assert (error.status_code, error.param) == (400, param)
    assert "chat template" in error.detail and "\n" not in str(refusal.value)
