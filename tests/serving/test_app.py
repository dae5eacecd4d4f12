"""What stands around the endpoints, in the order in which it must: pages of other origins, keys, failures."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from dflash_trt.serving.service import Service
from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running

PAGE = "https://page.example"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def guarded(llms: Engines) -> Iterator[RunningServer]:
    with running(llms["tiny"], api_keys=("key",), allowed_origins=(PAGE, "http://localhost:3000")) as server:
        yield server


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "authorization, content-type, x-request-id, x-stainless-os"
    return httpx.options(server.url + CHAT, headers=headers)


def test_a_browser_may_ask_before_it_has_shown_a_key(guarded: RunningServer) -> None:
    for origin in (PAGE, "http://localhost:3000"):
        response = preflight(guarded, origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert "POST" in response.headers["access-control-allow-methods"]
        allowed = response.headers["access-control-allow-headers"].lower()
        assert {"authorization", "content-type", "x-request-id", "x-stainless-os"} <= set(allowed.split(", "))


def test_pages_of_allowed_origins_read_answers_and_errors(guarded: RunningServer) -> None:
    headers = {"Origin": PAGE}
    body = {"messages": MESSAGES, "max_tokens": 1, "verbosity": "low"}
    for change, status in (({}, 200), ({"stream": True}, 200), ({"temperature": -1}, 400)):
        response = guarded.http.post(CHAT, json={**body, **change}, headers=headers)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, PAGE)
        exposed = response.headers["access-control-expose-headers"].lower()
        assert {"x-request-id", "x-ignored-fields", "retry-after"} == set(exposed.split(", "))
    response = httpx.post(guarded.url + CHAT, json=body, headers=headers)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)


def test_a_failure_is_readable_too(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "require_model", lambda *_: 1 // 0)
    response = guarded.http.post(CHAT, json={"messages": MESSAGES}, headers={"Origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (500, PAGE)


@pytest.mark.parametrize("origin", ["https://other.example", "https://page.example.org", "null", "http://page.example"])
def test_other_origins_are_told_nothing(guarded: RunningServer, origin: str) -> None:
    assert "access-control-allow-origin" not in preflight(guarded, origin).headers
    response = guarded.http.get("/v1/models", headers={"Origin": origin})
    assert response.status_code == 200 and "access-control-allow-origin" not in response.headers


def test_any_origin(llms: Engines) -> None:
    with running(llms["tiny"], allowed_origins=("*",)) as server:
        assert preflight(server, "https://any.example").headers["access-control-allow-origin"] == "*"
        response = server.http.get("/v1/models", headers={"Origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


def test_no_origin_is_allowed_unless_one_is_named(server: RunningServer) -> None:
    assert preflight(server, PAGE).status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/health", headers={"Origin": PAGE}).headers
