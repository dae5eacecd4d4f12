"""Keys, and limits on bodies, queues and time."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from dflash_trt.serving import connection, guards
from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running, wait_until


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return dict(response.json()["error"])


def test_keys(llms: Engines) -> None:
    with running(llms["tiny"], api_keys=("first", "sécond")) as server:
        assert server.openai.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).choices
        for given in ("Bearer sécond".encode(), b"bearer first"):
            assert server.http.get("/v1/models", headers={"Authorization": given}).status_code == 200
        for given in (b"", b"Bearer", b"Bearer wrong", b"Basic first", b"first", b"Bearer first second"):
            for path in ("/v1/models", "/v1/nothing", "/v1/chat/completions", "/tokenize"):
                error = error_of(server.http.post(path, headers={"Authorization": given}, json={}), 401)
                assert error["code"] == "invalid_api_key"
        for path in ("/health", "/ping", "/metrics", "/version"):
            assert httpx.get(server.url + path).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai.with_options(api_key="wrong").models.list()


@pytest.mark.parametrize("declared", [True, False])
def test_long_bodies(llms: Engines, declared: bool) -> None:
    with running(llms["tiny"], max_body_size=1000) as server:
        long = b'{"prompt": "' + b"a" * 1000 + b'"}'
        content: Any = long if declared else iter([long[:500], long[500:]])
        headers = {"content-type": "application/json"}
        error = error_of(server.http.post("/v1/completions", content=content, headers=headers), 413)
        assert error["code"] == "body_too_large"
        assert server.post("/v1/completions", prompt="a" * 100, max_tokens=1).status_code == 200


def test_a_full_queue(llms: Engines) -> None:
    """Eight slots and two that wait; whoever comes then is told to come back."""
    with running(llms["tiny"], max_queue=2) as server:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(server.post("/v1/completions", prompt="Saturday", max_tokens=2).status_code)

        clients = [threading.Thread(target=ask) for _ in range(10)]
        with server.paused():
            for client in clients:
                client.start()
            while server.engine.open_requests < 10:
                threading.Event().wait(0.001)
            response = server.post("/v1/chat/completions", messages=MESSAGES)
            assert error_of(response, 429)["code"] == "overloaded"
            assert int(response.headers["retry-after"]) > 0
            with pytest.raises(openai.RateLimitError):
                server.openai.completions.create(model="tiny", prompt="Saturday")
            assert server.http.get("/load").json() == {"server_load": 10}
            for change in ({"prompt": "a" * 100_000}, {"structured_outputs": {"regex": "("}}, {"prompt": [10**6]}):
                body = {"prompt": "Saturday", **change}
                assert error_of(server.post("/v1/completions", **body), 429)["code"] == "overloaded"
            assert error_of(server.post("/v1/completions", prompt="a", n=11), 400)["param"] == "n"
        for client in clients:
            client.join()
        assert statuses == [200] * 10
        assert server.post("/v1/completions", prompt="Saturday", max_tokens=2).status_code == 200
        assert error_of(server.post("/v1/completions", prompt="Saturday", n=11), 400)["param"] == "n"


def test_no_more_are_taken_than_there_is_room_for_however_many_come_at_once(llms: Engines) -> None:
    with running(llms["tiny"], max_queue=2) as server, ThreadPoolExecutor(40) as clients:
        with server.paused():
            body = {"prompt": "Saturday", "max_tokens": 2, "n": 3}
            asked = [clients.submit(server.post, "/v1/completions", **body) for _ in range(40)]
            wait_until(lambda: sum(one.done() for one in asked) == 37)
            assert server.engine.open_requests == 9
        statuses = [one.result().status_code for one in asked]
        assert sorted(statuses) == [200] * 3 + [429] * 37


def test_what_is_refused_leaves_its_room(llms: Engines) -> None:
    with running(llms["tiny"], max_queue=0) as server:
        for change, status in (({"prompt": "a" * 100_000}, 400), ({"prompt": []}, 400), ({"model": "x"}, 404)):
            for _ in range(3):
                error_of(server.post("/v1/completions", **{"prompt": "Saturday", "n": 8, **change}), status)
        assert server.post("/v1/completions", prompt="Saturday", n=8, max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(llms: Engines, stream: bool) -> None:
    with running(llms["tiny"], request_timeout=0.001) as server:
        body = {"prompt": "Saturday", "max_tokens": 400, "ignore_eos": True}
        if stream:
            events = server.events("/v1/completions", **body)
            error = events[-1]["error"]
        else:
            error = error_of(server.post("/v1/completions", **body), 504)
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")


def test_a_server_that_shuts_down_takes_nothing_new(llms: Engines) -> None:
    with running(llms["tiny"]) as server:
        server.engine.draining = True
        response = server.post("/v1/completions", prompt="Saturday")
        assert error_of(response, 503)["code"] == "shutting_down"
        assert "retry-after" in response.headers
        assert error_of(server.http.get("/health"), 503)


def test_a_client_that_takes_nothing_is_cut_off(llms: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer has long been made, and is open until then: it takes room, and holds up the end."""
    monkeypatch.setattr(connection, "_SEND_SECONDS", 0.5)
    long = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "return_token_sources": True}
    with running(llms["tiny"], max_queue=0) as server:
        with server.connect("/v1/completions", **long, n=8, stream=True) as client:
            wait_until(lambda: len(server.engine._open) == 1)
            (answer,) = server.engine._open
            wait_until(lambda: server.engine.open_requests == 0)
            assert all(one.finish_reason for one in answer.requests)
            while client.recv(65536):
                pass
        assert server.post("/v1/completions", prompt="Saturday", max_tokens=2).status_code == 200


def test_a_client_that_takes_little_is_not(llms: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that takes longer to read than the limit, which is on standing still."""
    monkeypatch.setattr(connection, "_SEND_SECONDS", 1.0)
    long = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "return_token_sources": True}
    with running(llms["tiny"]) as server, server.connect("/v1/completions", **long, n=8, stream=True) as client:
        received, reads = b"", 0
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += client.recv(4096)
            reads += 1
            time.sleep(0.02)
        assert reads * 0.02 > 2 * 1.0


def test_a_body_that_drips_is_refused_in_time(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a little of it comes."""
    monkeypatch.setattr(guards, "_BODY_SECONDS", 0.5)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        client.sendall(b"Content-Length: 100000\r\n\r\n")
        client.settimeout(0.02)
        received = b""
        for _ in range(3000):
            try:
                client.sendall(b" ")
                if not (piece := client.recv(4096)):
                    break
                received += piece
            except TimeoutError:
                pass
            except ConnectionError:
                break
        else:
            raise AssertionError("it may drip for a minute")
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and json.loads(body)["error"]["code"] == "body_timeout"


def test_a_body_that_stops_half_way_holds_nothing(server: RunningServer) -> None:
    """The connection waits for the rest; the engine and other clients do not."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        half.sendall(b'Content-Length: 100\r\n\r\n{"prompt": ')
        assert server.post("/v1/completions", prompt="Saturday", max_tokens=1).status_code == 200
        assert server.engine.open_requests == 0
