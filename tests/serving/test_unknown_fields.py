"""Fields that nothing here reads: named in the response, counted, logged once; or refused."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from dflash_trt.serving.chat_protocol import ChatRequest
from dflash_trt.serving.unknown_fields import IgnoredFields, ignored_fields
from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running

USER = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        ({"verbosity": "low", "session_id": "a", "return_meta_info": True}, "verbosity, session_id, return_meta_info"),
        ({"prompt_cache_retention": "24h", "prediction": {"type": "content"}}, "prompt_cache_retention, prediction"),
        ({"messages": [{**USER, "cache_control": {"type": "ephemeral"}}] * 3}, "messages[].cache_control"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
            "messages[].content[].cache_control",
        ),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
        ({"tempurature": 0.5}, "tempurature"),
        ({"tempurature": None, "use_beam_search": False, "best_of": 1, "echo": False, "audio": None}, None),
        ({"skip_special_tokens": True, "n": 1, "stream": False, "functions": []}, None),
        ({"ключ\r\nSet-Cookie: a": 1, 'a"b,c': 1}, "??????Set-Cookie??a, a?b?c"),
        ({"a" * 5000: 1}, "a" * 64),
        ({f"field{i}": 0 for i in range(200)}, ", ".join([*(f"field{i}" for i in range(16)), "184 more"])),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_response_names_what_was_ignored(server: RunningServer, extras: dict[str, Any], named: str | None) -> None:
    response = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 1, **extras})
    assert response.status_code == 200, response.text
    assert response.headers.get("x-ignored-fields") == named


def test_openai_s_client_may_send_what_other_servers_take(server: RunningServer) -> None:
    raw = server.openai.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "a"}}]}],  # type: ignore[list-item, typeddict-unknown-key]
        max_tokens=1,
        verbosity="low",
        prompt_cache_key="a",
        extra_body={"top_k": 5, "session_id": "b"},
    )
    assert raw.headers["x-ignored-fields"] == "messages[].content[].cache_control, verbosity, session_id"
    assert raw.parse().choices


def test_each_is_counted_and_logged_once(llms: Engines, caplog: pytest.LogCaptureFixture) -> None:
    with running(llms["tiny"]) as server:
        for _ in range(3):
            server.post("/v1/completions", prompt="Hi", max_tokens=1, colour="red")
            server.post("/tokenize", prompt="Hi", messages=None, colour="red", temperature=1)
        lines = server.http.get("/metrics").text.splitlines()
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["colour", "temperature"]
    assert 'dflash_trt:ignored_request_fields_total{field="colour",model_name="tiny"} 6.0' in lines
    assert 'dflash_trt:ignored_request_fields_total{field="temperature",model_name="tiny"} 3.0' in lines


def test_clients_cannot_make_up_any_number_of_names(caplog: pytest.LogCaptureFixture) -> None:
    counts: Counter[str] = Counter()
    fields = IgnoredFields(lambda name: counts.update([name]))
    for i in range(1000):
        fields.note([f"field{i}", "field0"])
    assert len(counts) == 129 and counts["field0"] == 1001 and counts["others"] == 872
    assert len(caplog.records) == 128 and caplog.records[0].levelno == logging.WARNING


def test_what_is_ignored_is_in_no_prompt() -> None:
    tool = {"type": "function", "colour": "red", "function": {"name": "rain", "colour": "red"}}
    body = {"messages": [{**USER, "colour": "red"}], "tools": [tool]}
    request = ChatRequest.model_validate(body)
    assert request.tools and "red" not in str(request.tools[0].model_dump()) + str(request.messages[0].model_dump())
    found = ignored_fields(request, body, {}, strict=False)
    assert found == ["messages[].colour", "tools[].colour", "tools[].function.colour"]


def test_strict_fields(llms: Engines) -> None:
    with running(llms["tiny"], strict_fields=True) as server:
        for extras, param in (
            ({"tempurature": 1}, "tempurature"),
            ({"verbosity": "low"}, "verbosity"),
            ({"messages": [USER, {**USER, "colour": "red"}]}, "messages[1].colour"),
            ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ):
            response = server.post(CHAT, **{"messages": MESSAGES, "max_tokens": 1, **extras})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        harmless = {"tempurature": None, "use_beam_search": False, "user": "a", "metadata": {"a": "b"}}
        assert server.post(CHAT, messages=MESSAGES, max_tokens=1, **harmless).status_code == 200
