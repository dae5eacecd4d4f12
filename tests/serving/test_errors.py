"""Mistakes of clients: OpenAI's body, the right status, the field at fault."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serving.running_server import MESSAGES, RunningServer

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi"}


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [USER, {"role": "user", "content": 1}]}, "messages[1].content"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [USER, {**USER, "tools": [{}]}]}, "messages[1].tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 10**4}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"include_usage": False}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"verify_window": 0}, "verify_window"),
        ({"verify_window": 9}, "verify_window"),
        ({"priority": "high"}, "priority"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"model": 7}, "model"),
    ],
    ids=str,
)
def test_the_field_at_fault_is_named(server: RunningServer, change: dict[str, Any], param: str) -> None:
    body = {
        name: value for name, value in {"messages": MESSAGES, "max_tokens": 1, **change}.items() if value is not None
    }
    error = error_of(server.post("/v1/chat/completions", **body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["Hi", ""]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[1], [2, 10**6]]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "Hi", "suffix": "!"}, "suffix"),
        ({"prompt": "Hi", "best_of": 2}, "best_of"),
        ({"prompt": "Hi", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "Hi", "messages": MESSAGES}, "messages"),
        ({"prompt": "Hi", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ["Hi"] * 1000}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_prompts_that_cannot_be(server: RunningServer, body: dict[str, Any], param: str) -> None:
    assert error_of(server.post("/v1/completions", **body), 400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'["prompt"]',
        b"null",
        b'"prompt"',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_not_json_is_refused(server: RunningServer, body: bytes) -> None:
    error_of(server.http.post("/v1/completions", content=body, headers=JSON), 400)


def test_other_media_are_refused(server: RunningServer) -> None:
    """Among them what a page of another site can send without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": kind})
        assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_a_prompt_that_is_too_long(server: RunningServer) -> None:
    long = "the old map " * 300
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": ["Hi", [7] * 512]}, "prompt"),
    ):
        error = error_of(server.post(path, **body), 400)
        assert error["param"] in (param, "prompt[1]")
    assert error_of(server.post("/v1/completions", prompt=long), 400)["code"] == "context_length_exceeded"


def test_the_longest_prompt_that_fits_gets_one_token(server: RunningServer) -> None:
    answer = server.post("/v1/completions", prompt=[7] * 511, max_tokens=100).json()
    assert answer["usage"] == {"prompt_tokens": 511, "completion_tokens": 1, "total_tokens": 512}
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_paths_and_methods(server: RunningServer) -> None:
    assert error_of(server.http.get("/v1/embeddings"), 404)["code"] == "not_found"
    assert error_of(server.http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert error_of(server.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"


def test_the_official_client_sees_its_own_exceptions(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        server.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
