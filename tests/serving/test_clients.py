"""Clients as they are on PyPI: their helpers work, and what they send back of an answer is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.providers.openai import OpenAIProvider

from dflash_trt.runtime.llm import LLM
from tests.serving.running_server import MESSAGES, RunningServer, running
from tests.serving.templates import LLAMA3, QWEN3


class Weather(BaseModel):
    """The weather of a place."""

    place: Literal["mill", "market"]
    now: bool


QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
SAMPLED: dict[str, Any] = {"model": "tiny", "temperature": 1.0, "seed": 1, "max_tokens": 200, "extra_body": QUIET}
TOOLS: list[Any] = [openai.pydantic_function_tool(Weather)]
CALLED: dict[str, Any] = {**SAMPLED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module", params=[QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def server(templated: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with running(LLM(templated(request.param), device="cpu")) as server:
        yield server


def send_back(server: RunningServer, message: BaseModel, *more: Any, **options: Any) -> None:
    """The client's own object, and each dump of it, continue the conversation to the same prompt."""
    counts = set()
    for form in (message, message.model_dump(), message.model_dump(exclude_none=True), message.to_dict()):  # type: ignore[attr-defined]
        history: Any = [*MESSAGES, form, *more]
        answer = server.openai.chat.completions.create(**{**SAMPLED, "max_tokens": 1}, messages=history, **options)
        assert answer.usage is not None
        counts.add(answer.usage.prompt_tokens)
    assert len(counts) == 1


def test_parse(server: RunningServer) -> None:
    answer = server.openai.chat.completions.parse(**SAMPLED, messages=MESSAGES, response_format=Weather)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Weather) and not message.tool_calls
    send_back(server, message, {"role": "user", "content": "And later?"})


def test_parse_of_tools(server: RunningServer) -> None:
    message = server.openai.chat.completions.parse(**CALLED, messages=MESSAGES).choices[0].message
    assert message.tool_calls is not None and isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    send_back(server, message, result, tools=TOOLS)


def test_the_helper_of_streams(server: RunningServer) -> None:
    with server.openai.chat.completions.stream(**SAMPLED, messages=MESSAGES, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(message.parsed, Weather)
    send_back(server, message, {"role": "user", "content": "And later?"})

    with server.openai.chat.completions.stream(**CALLED, messages=MESSAGES) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert message.tool_calls is not None and isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
    send_back(
        server, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}, tools=TOOLS
    )


def test_a_call_cut_anywhere_comes_back(server: RunningServer) -> None:
    """Until its arguments begin it leaves nothing, then it is a call whose arguments are no JSON."""
    seen = set()
    for length in range(1, 60, 7):
        body = {**CALLED, "messages": MESSAGES, "max_tokens": length}
        answer = server.openai.chat.completions.create(**body).choices[0]
        if answer.finish_reason != "length":
            break
        calls = answer.message.tool_calls or []
        assert not answer.message.content
        seen.add(len(calls))
        more: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "cut"} for call in calls]
        history: list[Any] = [*MESSAGES, answer.message.model_dump(), *more, *MESSAGES]
        again = server.openai.chat.completions.create(**{**SAMPLED, "max_tokens": 1}, messages=history, tools=TOOLS)
        assert again.choices[0].finish_reason == "length"
    assert seen == {0, 1}


def test_an_agent(server: RunningServer) -> None:
    """It has to call its output's tool, may call another before, and goes on from the messages that it keeps."""
    model = OpenAIChatModel(
        "tiny",
        provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"),
        settings=OpenAIChatModelSettings(
            temperature=1.0, seed=3, max_tokens=300, parallel_tool_calls=False, extra_body=QUIET
        ),
    )
    agent = Agent(
        model, output_type=Weather, instructions="Be brief.", system_prompt="You know the weather.", retries=3
    )
    asked = []

    @agent.tool_plain
    def look(at: Literal["sky", "sea"]) -> str:
        """Look at something."""
        asked.append(at)
        return f"The {at} is blue."

    first = agent.run_sync("What is the weather?")
    assert isinstance(first.output, Weather)
    second = agent.run_sync("And later?", message_history=first.all_messages())
    assert isinstance(second.output, Weather)
    assert len(second.all_messages()) > len(first.all_messages())
