"""Tools, and thinking, of models whose templates have them: the tiny pair behind Qwen3's template and Llama's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.runtime.llm import LLM
from tests.conftest import TINY
from tests.serving.running_server import MESSAGES, RunningServer, running
from tests.serving.templates import LLAMA3, QWEN3

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
RAIN = {
    "type": "object",
    "properties": {"now": {"type": "boolean"}},
    "required": ["now"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "rain", "parameters": RAIN}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
SAMPLED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "seed": 1, "max_tokens": 200}
QUIET: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module", params=[QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def server(templated: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running(LLM(templated(request.param), device="cpu")) as server:
        yield server


def require_arguments(name: str, text: str) -> None:
    """Arguments that match the tool's schema."""
    arguments = json.loads(text)
    if name == "weather":
        assert arguments.keys() == {"city", "days"}
        assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 10
        assert arguments["days"] in range(1, 10)
    else:
        assert name == "rain" and arguments.keys() == {"now"} and isinstance(arguments["now"], bool)


def streamed_calls(server: RunningServer, **body: Any) -> tuple[list[tuple[str, str]], str | None]:
    """Names and arguments that the deltas add up to, and why the stream ended."""
    calls: dict[int, list[str]] = {}
    ids, reason = set(), None
    for chunk in server.openai.chat.completions.create(**body, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            if call.function.name is not None:
                assert call.index == len(calls) and call.type == "function"
                calls[call.index] = [call.function.name, ""]
                ids.add(call.id)
            calls[call.index][1] += call.function.arguments or ""
    assert len(ids) == len(calls)
    return [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("window", [1, 8])
def test_a_call_that_must_be_made_matches_its_schema(server: RunningServer, choice: Any, window: int) -> None:
    body: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    body["extra_body"] = {**QUIET, "verify_window": window}
    answer = server.openai.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.id
    assert choice == "required" or call.function.name == "weather"
    require_arguments(call.function.name, call.function.arguments)
    assert streamed_calls(server, **body) == ([(call.function.name, call.function.arguments)], "tool_calls")


def test_the_answer_may_be_no_call(server: RunningServer) -> None:
    """Under "auto" of a model that has learned no calls, and under "none", where nothing is read as one."""
    body: dict[str, Any] = {**SAMPLED, "max_tokens": 20, "tools": TOOLS}
    texts = []
    for choice in ("auto", "none"):
        answer = server.openai.chat.completions.create(**body, tool_choice=choice).choices[0]
        assert not answer.message.tool_calls and answer.finish_reason != "tool_calls"
        texts.append(answer.message.content)
    assert texts[0] == texts[1]


def test_a_result_goes_back(server: RunningServer) -> None:
    """What the client got, and what its tool said, make a prompt that is answered."""
    body: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "extra_body": QUIET, "parallel_tool_calls": False}
    message = server.openai.chat.completions.create(**body, tool_choice=NAMED).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    body |= {"messages": [*MESSAGES, message.model_dump(exclude_none=True), result], "max_tokens": 5}
    answer = server.openai.chat.completions.create(**body)
    assert answer.usage is not None and answer.usage.completion_tokens >= 1


def test_tools_are_tokenized_as_they_are_shown(server: RunningServer) -> None:
    """`/tokenize` tells what a completion's prompt will take."""
    plain = server.post("/tokenize", messages=MESSAGES, **QUIET).json()["count"]
    told = server.post("/tokenize", messages=MESSAGES, tools=TOOLS, **QUIET, return_token_strs=True).json()
    answer = server.post("/v1/chat/completions", **{**SAMPLED, "max_tokens": 1}, tools=TOOLS, **QUIET).json()
    assert told["count"] == answer["usage"]["prompt_tokens"] > plain
    assert '"Of a city"' in "".join(told["token_strs"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "snow"}}}, "tool_choice.function.name"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
    ],
    ids=str,
)
def test_refusals_name_the_field(server: RunningServer, change: dict[str, Any], param: str) -> None:
    response = server.post("/v1/chat/completions", **{**SAMPLED, "tools": TOOLS, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_schema_that_no_grammar_has(server: RunningServer) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "numbr"}}, "required": ["x"]}
    tools = [{"type": "function", "function": {"name": "a", "parameters": bad}}]
    response = server.post("/v1/chat/completions", **SAMPLED, tools=tools, tool_choice="required")
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "tools[0].function.parameters.properties.x.type",
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": '{"type": "object"} and more'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/a"}}}},
            "response_format.json_schema.schema.$ref",
        ),
    ],
    ids=str,
)
def test_a_form_that_no_grammar_has(server: RunningServer, change: dict[str, Any], param: str) -> None:
    """The field is named that gave it, whether it is refused by itself or with thinking and calls around it."""
    response = server.post("/v1/chat/completions", **SAMPLED, tools=TOOLS, **change)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and error["message"].startswith(param)


def test_a_form_is_answered_in_content(server: RunningServer) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
    answer = server.openai.chat.completions.create(**SAMPLED, response_format=form, extra_body=QUIET).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content
    require_arguments("rain", answer.message.content)


@pytest.mark.parametrize("server", [QWEN3], indirect=True, ids=["qwen3"])
def test_thinking_is_kept_apart(server: RunningServer) -> None:
    """A form may come after thinking; a bias against how the form begins has the model think, to the last token."""
    opening = {
        str(token): -100 for text, token in load_tokenizer(TINY / "target").get_vocab().items() if text.startswith("{")
    }
    form = {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
    body: dict[str, Any] = {**SAMPLED, "max_tokens": 40, "response_format": form, "logit_bias": opening}
    message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert message["reasoning"] and "<think>" not in message["reasoning"] and message["content"] == ""

    deltas = [event["choices"][0]["delta"] for event in server.events("/v1/chat/completions", **body)]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
    hidden = server.post("/v1/chat/completions", **body, include_reasoning=False).json()["choices"][0]["message"]
    assert "reasoning" not in hidden and hidden["content"] == ""
