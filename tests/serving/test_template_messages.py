"""Messages of tools and their results, as real chat templates render them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.checkpoint.encoding import encode_conversation
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.template_messages import template_messages
from dflash_trt.serving.tools import read_tool_use
from tests.conftest import TINY
from tests.serving.templates import LLAMA3, QWEN3

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": [1]}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Rain?"}, {"type": "text", "text": "Sun?"}]},
    {"role": "assistant", "content": None, "reasoning": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)


def rendered(tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    tokenizer.chat_template = template
    messages, definitions = template_messages(CONVERSATION), read_tool_use(TOOLS, None, None).definitions
    ids = encode_conversation(tokenizer, messages, "x", add_generation_prompt=True, tools=definitions)
    assert ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, tools=definitions
    )
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, tools=definitions))


def test_qwen3(tokenizer: PreTrainedTokenizerFast) -> None:
    text = rendered(tokenizer, QWEN3)
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in text
    assert "<|im_start|>user\nRain?\nSun?<|im_end|>" in text
    assert (
        "<|im_start|>assistant\n<think>\nI look it up.\n</think>\n\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Köln", "days": [1]}}\n</tool_call><|im_end|>' in text
    )
    assert text.endswith("<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_llama3(tokenizer: PreTrainedTokenizerFast) -> None:
    text = rendered(tokenizer, LLAMA3)
    assert '{"name": "weather", "parameters": {"city": "Köln", "days": [1]}}<|eot_id|>' in text
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "sun"}<|eot_id|>' in text
    assert '"function": {"name": "weather"' in text


def test_messages_are_not_changed_in_place() -> None:
    before = copy.deepcopy(CONVERSATION)
    template_messages(CONVERSATION)
    assert before == CONVERSATION


def test_empty_keys_are_left_out() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "reasoning": None}
    assert template_messages([message]) == [{"role": "assistant", "content": "a"}]
    assert template_messages([{**message, "tool_calls": []}]) == [{"role": "assistant", "content": "a"}]
    call = {"function": {"name": "f", "arguments": ""}}
    assert template_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [
        {"id": None, "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (None, {}),
        ("", {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        *((text, text) for text in ('{"city": "Ro', "{", "[]", "3", '{"a": "\\ud83d"}', "[" * 100_000)),
    ],
)
def test_arguments_that_are_no_object_stay_as_they_are(text: str | None, arguments: object) -> None:
    """Cut, or with half a character, as an answer may have them."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert template_messages([message])[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_an_answer_may_have_no_content() -> None:
    for message, content in (
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ):
        assert template_messages([{"role": "assistant", **message}]) == [{"role": "assistant", "content": content}]


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ({"role": "robot", "content": "a"}, r"messages\[0\]\.role: is 'robot'"),
        ({"content": "a"}, r"messages\[0\]\.role: is None"),
        ({"role": "user"}, r"messages\[0\]\.content: must be a text"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content: must be a text"),
        ({"role": "user", "content": ["a"]}, r"messages\[0\]\.content\[0\]: must be \{'type': 'text'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\]\.content\[0\]: must be"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, r"messages\[0\]\.tool_calls: only an assistant"),
        ({"role": "assistant", "tool_calls": [3]}, r"messages\[0\]\.tool_calls\[0\]: must be"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 3, "arguments": "{}"}}]},
            r"messages\[0\]\.tool_calls\[0\]\.function\.name: must be a text",
        ),
    ],
)
def test_refusals_name_the_field(message: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidField, match=f"^{refusal}"):
        template_messages([message])
    with pytest.raises(InvalidField, match=r"^messages: is empty"):
        template_messages([])
