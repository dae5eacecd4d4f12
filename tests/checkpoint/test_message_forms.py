"""The forms that messages take for templates of each kind, and that nothing of a conversation disappears."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash_trt.checkpoint.encoding import DroppedByTemplate, _forms, encode_conversation
from dflash_trt.checkpoint.message_forms import MessageForms
from dflash_trt.errors import UserError
from tests.conftest import TINY
from tests.serving.templates import TEMPLATES

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}]
DEVELOPER = (("developer", "system"),)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY / "target", local_files_only=True)


def encoded(tokenizer: PreTrainedTokenizerFast, name: str, messages: list[Any], **options: Any) -> str:
    """The prompt that a template makes, as text."""
    tokenizer.chat_template = TEMPLATES.get(name, name)
    options = {"bos_token": "", "eos_token": "", **options}
    return str(tokenizer.decode(encode_conversation(tokenizer, messages, "x", add_generation_prompt=True, **options)))


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("chatml", MessageForms(DEVELOPER)),
        ("qwen3", MessageForms(DEVELOPER)),
        ("llama3", MessageForms(DEVELOPER, content_apart=True)),
        ("mistral", MessageForms(DEVELOPER, content_apart=True)),
        ("gemma", MessageForms()),
        ("gptoss", MessageForms(one_call=True)),
        ("deepseek", MessageForms(DEVELOPER, arguments_as_text=True)),
        ("parts", MessageForms(DEVELOPER, in_parts=ROLES)),
    ],
)
def test_forms_of_templates(name: str, forms: MessageForms, tools: bool) -> None:
    assert _forms(TEMPLATES[name], (("bos_token", "<s>"), ("eos_token", "</s>")), tools) == forms


def test_a_template_that_knows_developers_only() -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}{# developer #}"
    assert _forms(template, (), False).renamed == (("system", "developer"),)


def test_arguments_that_would_be_written_as_python() -> None:
    call = "{{ c.function.name }} {{ c.function.arguments }}"
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}" + call + "{% endfor %}{% endfor %}"
    assert _forms(template, (), False).arguments_as_text


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Rain?"}
ANSWER = {"role": "assistant", "content": "Sun."}


def calls(*names: str, content: str = "") -> list[dict[str, Any]]:
    made = [
        {"id": f"12345678{at}", "type": "function", "function": {"name": name, "arguments": {"in": f"city {at}"}}}
        for at, name in enumerate(names)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"told {call['id']}"} for call in made]
    return [{"role": "assistant", "content": content, "tool_calls": made}, *results]


@pytest.mark.parametrize(
    ("name", "messages", "place"),
    [
        ("qwen3", [ASK, {"role": "developer", "content": "Be brief."}, ASK], None),
        ("gptoss", [ASK, SYSTEM], "messages[1].content"),
        ("gptoss", [SYSTEM, ASK, {"role": "developer", "content": "Be brief."}], "messages[2].content"),
        ("chatml", [ASK, *calls("weather")], "messages[1].tool_calls[0]"),
        ("parts", [ASK, *calls("weather")], "messages[1].tool_calls[0]"),
        ("{{ messages[-1].content }}", [ASK], None),
        ("{{ messages[-1].content }}", [ASK, ANSWER, ASK], "messages[0].content"),
        (
            "{% for m in messages if m.role != 'tool' %}{{ m | tojson }}{% endfor %}",
            [ASK, *calls("f")],
            "messages[2].content",
        ),
        ("{{ messages[0].content[:3] }}", [{"role": "user", "content": ""}], None),
        ("nothing", [ASK], "messages[0].content"),
    ],
)
def test_what_a_template_drops_is_named(
    tokenizer: PreTrainedTokenizerFast, name: str, messages: list[Any], place: str | None
) -> None:
    before = copy.deepcopy(messages)
    if place is None:
        encoded(tokenizer, name, messages)
    else:
        with pytest.raises(DroppedByTemplate, match=rf"^x: {re.escape(place)}: the model's chat template drops it"):
            encoded(tokenizer, name, messages)
    assert messages == before


def test_a_developer_is_a_system_to_who_knows_none(tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("qwen3", "llama3", "chatml", "mistral", "deepseek"):
        messages = [{**SYSTEM, "role": "developer"}, ASK]
        assert encoded(tokenizer, name, messages) == encoded(tokenizer, name, [SYSTEM, ASK])
    assert "developer" in encoded(tokenizer, "gptoss", [SYSTEM, ASK])


def test_calls_one_by_one(tokenizer: PreTrainedTokenizerFast) -> None:
    """Each before its own result, whatever order results come in; content and reasoning once."""
    say, first, second = calls("f", "g", content="I look.")
    say["reasoning_content"] = "Hm."
    taken = MessageForms(one_call=True, content_apart=True).apply([ASK, say, first, second, ANSWER])
    assert [index for index, _ in taken] == [0, 1, 1, 2, 1, 3, 4]
    shown = [message for _, message in taken if message["role"] == "assistant"]
    assert [message["content"] for message in shown] == ["I look.", "", "", "Sun."]
    assert [len(message.get("tool_calls", [])) for message in shown] == [0, 1, 1, 0]
    assert [message.get("reasoning_content") for message in shown] == ["Hm.", None, None, None]
    swapped = MessageForms(one_call=True).apply([say, second, first])
    assert [message.get("tool_call_id") for _, message in swapped] == [
        None,
        None,
        second["tool_call_id"],
        first["tool_call_id"],
    ]

    text = encoded(tokenizer, "gptoss", [ASK, say, first, second])
    assert text.index("functions.f to=") < text.index("told 123456780") < text.index("to=functions.g")
    assert text.index("functions.g to=") < text.index("told 123456781")


def test_reasoning_and_names_may_be_dropped(tokenizer: PreTrainedTokenizerFast) -> None:
    """Models are not shown what they thought in earlier turns."""
    thought = {**ANSWER, "reasoning_content": "Look it up.", "name": "Ada"}
    assert "Look" not in encoded(tokenizer, "qwen3", [ASK, thought, ASK])
    tagged = {"role": "assistant", "content": "<think>\nLook it up.\n</think>\n\nSun."}
    for name in ("qwen3", "deepseek"):
        text = encoded(tokenizer, name, [ASK, tagged, ASK])
        assert "Look" not in text and "Sun." in text
    said = calls("f", content="Look it up.")
    assert "Look" not in encoded(tokenizer, "gptoss", [ASK, *said, ANSWER, ASK])


words = st.from_regex(r"[a-z]{1,12}", fullmatch=True).map(lambda word: f"  {word}\n")
plain = st.fixed_dictionaries({"role": st.sampled_from(sorted(ROLES - {"tool"})), "content": words | st.just("")})
turns = st.one_of(
    plain.map(lambda message: [message]),
    st.lists(st.sampled_from(["f", "g"]), min_size=1, max_size=3).map(lambda names: calls(*names)),
    st.lists(st.sampled_from(["f", "g"]), min_size=1, max_size=3).map(lambda names: calls(*names, content="I look.")),
)
conversations = st.lists(turns, min_size=1, max_size=5).map(
    lambda turns: [message for turn in turns for message in turn]
)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25)
@given(messages=conversations)
def test_nothing_disappears(
    tokenizer: PreTrainedTokenizerFast, name: str, tools: list[Any] | None, messages: list[dict[str, Any]]
) -> None:
    """Whatever a conversation says is in the prompt as often as it is said, or the conversation is refused."""
    try:
        text = encoded(tokenizer, name, messages, tools=tools)
    except UserError as error:
        assert re.match(r"x: (messages\[\d+\]\.\w+(\[\d+\])?: |)the (model's )?chat template ", str(error))
        return
    said = [message["content"].strip() for message in messages if not message.get("tool_calls")]
    made = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    said += [function["arguments"]["in"] for function in made]
    if name != "gptoss":
        said += [message["content"] for message in messages if message.get("tool_calls")]
    for each in set(said):
        assert text.count(each) >= said.count(each)
