"""Chat by the official client: what comes is what the engine makes of the conversation by itself."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from dflash_trt.runtime.generation import CompletionOutput
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.serving.running_server import MESSAGES, RunningServer

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


def expected(alone: LLM, messages: list[Any] = MESSAGES, **params: Any) -> list[CompletionOutput]:
    return alone.generate([alone.encode_chat(messages)], SamplingParams(**params))[0].outputs


def stream(server: RunningServer, **body: Any) -> list[ChatCompletionChunk]:
    return list(server.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **body))


def content(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_an_answer_is_the_engines_own(
    server: RunningServer, alone: LLM, params: dict[str, Any], window: int | None
) -> None:
    (output,) = expected(alone, **params, max_tokens=50)
    body: dict[str, Any] = {**params, "max_tokens": 50, "extra_body": {"verify_window": window}}
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, **body)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role) == (output.text, "assistant")
    assert choice.finish_reason == output.finish_reason
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(alone.encode_chat(MESSAGES))
    assert answer.usage.completion_tokens == len(output.token_ids)
    assert content(stream(server, **body)) == output.text


def test_a_stream_has_the_shape_that_clients_expect(server: RunningServer) -> None:
    chunks = stream(server, max_tokens=20, temperature=0)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_or_always(server: RunningServer) -> None:
    *chunks, last = stream(server, max_tokens=20, temperature=0, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 20
    assert all(chunk.usage is None for chunk in chunks)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    usages = [chunk.usage for chunk in stream(server, max_tokens=20, temperature=0, stream_options=options)]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages) and counts == sorted(counts) and counts[-1] == 20


def test_several_outputs(server: RunningServer, alone: LLM) -> None:
    outputs = expected(alone, **SAMPLED, n=3, max_tokens=30)
    answer = server.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, **SAMPLED, n=3, max_completion_tokens=30
    )
    assert [choice.message.content for choice in answer.choices] == [output.text for output in outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    chunks = stream(server, **SAMPLED, n=3, max_tokens=30)
    assert [content(chunks, index) for index in range(3)] == [output.text for output in outputs]


def test_stop_texts(server: RunningServer, alone: LLM) -> None:
    (whole,) = expected(alone, max_tokens=60)
    stop = whole.text[25:29]
    (output,) = expected(alone, max_tokens=60, stop=stop)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "stop": stop}
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, **body).choices[0]
    assert (answer.message.content, answer.finish_reason) == (output.text, "stop")
    assert content(stream(server, **body)) == output.text == whole.text[: whole.text.index(stop)]


def test_a_conversation_goes_on(server: RunningServer, alone: LLM) -> None:
    """Content in parts, and an answer sent back as the client has it."""
    answer = server.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=40)
    text = answer.choices[0].message.content
    again: list[Any] = [
        *MESSAGES,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": [{"type": "text", "text": "Begin on"}, {"type": "text", "text": "Monday."}]},
    ]
    plain = [
        *MESSAGES,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Begin on\nMonday."},
    ]
    (output,) = expected(alone, plain, max_tokens=20)
    answer = server.openai.chat.completions.create(model="tiny", messages=again, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == output.text


def test_what_speculation_did_is_told_when_asked(server: RunningServer, alone: LLM) -> None:
    prompt = alone.encode_chat(MESSAGES)
    (output,) = alone.generate([prompt], SamplingParams(max_tokens=40), verify_window=8)[0].outputs
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "verify_window": 8}
    asked = {**body, "return_speculation": True, "return_token_sources": True}
    whole = server.post("/v1/chat/completions", **asked).json()
    told = whole["speculation"]
    assert told["num_draft_tokens"] == output.statistics.draft_tokens
    assert told["num_accepted_draft_tokens"] == output.statistics.accepted_tokens
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"]) == output.statistics.drafts
    accepted = sum(count * times for count, times in enumerate(told["acceptance_histogram"]))
    assert accepted == told["num_accepted_draft_tokens"]
    assert told["mean_acceptance_length"] == 1 + accepted / told["num_spec_steps"]
    assert told["draft_acceptance_rate"] == accepted / told["num_draft_tokens"]

    tokens = whole["choices"][0]["token_sources"]
    assert "".join(token["text"] for token in tokens) == output.text
    assert len(tokens) == len(output.token_ids)
    assert 0 < sum(token["drafted"] for token in tokens) <= accepted

    events = server.events("/v1/chat/completions", **asked)
    assert events[-1]["speculation"] == told
    assert [each for event in events for c in event["choices"] for each in c["token_sources"]] == tokens
    assert all("speculation" not in event for event in events[:-1])
    assert "speculation" not in server.post("/v1/chat/completions", **body).json()


def test_speculation_may_be_forbidden(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20, "verify_window": 1}
    answer = server.post("/v1/chat/completions", **body, return_speculation=True, return_token_sources=True).json()
    assert answer["speculation"]["num_draft_tokens"] == 0
    assert answer["speculation"]["mean_acceptance_length"] == 1
    assert not any(token["drafted"] for token in answer["choices"][0]["token_sources"])


def test_fields_of_openais_clients_that_mean_nothing_here_are_taken(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=3,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        modalities=["text"],
        reasoning_effort="low",
        response_format={"type": "text"},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 3
