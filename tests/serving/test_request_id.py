"""Every response says what its request is called, whatever became of it."""

from __future__ import annotations

import logging

import pytest

from dflash_trt.serving.service import Service
from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running

REQUESTS = [
    ("GET", "/health", 200),
    ("HEAD", "/health", 200),
    ("GET", "/v1/nothing", 404),
    ("GET", "/v1/completions", 405),
    ("POST", "/v1/completions", 415),
    ("OPTIONS", "/v1/completions", 405),
]


@pytest.mark.parametrize(("method", "path", "status"), REQUESTS)
def test_it_is_the_client_s_where_there_is_one(server: RunningServer, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path, headers={"X-Request-Id": "trace-17/a"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "trace-17/a")
    own = [server.http.request(method, path).headers["x-request-id"] for _ in range(2)]
    assert own[0] != own[1] and len(own[0]) == 32


@pytest.mark.parametrize("given", [b"", b"a b", b"a" * 129, b"\xe9", b'a"b', b"<a>"])
def test_what_is_no_plain_word_is_not_repeated(server: RunningServer, given: bytes) -> None:
    response = server.http.get("/health", headers={b"X-Request-Id": given})
    assert len(response.headers["x-request-id"]) == 32


def test_streams_and_refused_fields_have_it(server: RunningServer) -> None:
    headers = {"X-Request-Id": "trace-18"}
    body = {"messages": MESSAGES, "max_tokens": 2}
    for change, status in (({"stream": True}, 200), ({"temperature": -1}, 400), ({"model": "b"}, 404)):
        response = server.http.post("/v1/chat/completions", json={**body, **change}, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (status, "trace-18")


def test_guards_answers_have_it(llms: Engines) -> None:
    with running(llms["tiny"], api_keys=("a",), max_body_size=100) as server:
        headers = {"X-Request-Id": "trace-19"}
        for key, status in (("b", 401), ("a", 413)):
            response = server.http.post(
                "/v1/completions", json={"prompt": "a" * 200}, headers={**headers, "Authorization": f"Bearer {key}"}
            )
            assert (response.status_code, response.headers["x-request-id"]) == (status, "trace-19")


def test_a_failure_nobody_foresaw_has_it_and_is_logged_with_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Service, "require_model", lambda *_: 1 // 0)
    headers = {"X-Request-Id": "trace-20"}
    response = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert response.headers["x-request-id"] == "trace-20"
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "trace-20" in record.getMessage() and record.exc_info and record.exc_info[0] is ZeroDivisionError


def test_the_log_has_all_of_them(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dflash_trt.serving.request_id"):
        server.http.get("/v1/nothing%0D%0A", headers={"X-Request-Id": "trace-21"})
    (record,) = caplog.records
    assert record.getMessage() == "trace-21 GET '/v1/nothing\\r\\n': 404"
