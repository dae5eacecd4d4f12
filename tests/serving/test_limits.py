"""Keys, and limits on bodies, connections, queues and time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dflash_trt.serving import connection, guards, json_body
from dflash_trt.serving.limits import request_limits
from tests.conftest import Engines
from tests.serving.running_server import MESSAGES, RunningServer, running, wait_until
from tests.serving.server_process import serving


@pytest.fixture
def server(llms: Engines) -> Iterator[RunningServer]:
    """For one test: others here serve the same engine, which has one server at a time."""
    with running(llms["tiny"]) as server:
        yield server


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


def test_limits_leave_room_for_the_longest_prompts(llms: Engines) -> None:
    """In characters that JSON writes as escapes, as token ids with blanks, in messages of one token."""
    tokenizer = llms["tiny"].tokenizer
    for tokens in (64, 4096, 131_072):
        limits = request_limits(tokenizer, max_seq_len=tokens)
        longest = max(tokenizer.get_vocab(), key=len)
        bodies = [
            {"prompt": "\N{SNOWMAN}" * tokens},
            {"prompt": [151_643] * tokens},
            {"prompt": longest * tokens},
            {"messages": [{"role": "user", "content": "a"}] * (tokens // 4)},
        ]
        for body in bodies:
            text = json.dumps(body).encode()
            assert len(text) < limits.max_body_size and json_body.json_shape(text).values < limits.max_values
        assert len(longest * tokens) == limits.max_characters and limits.max_messages == tokens
    assert request_limits(tokenizer, max_seq_len=64, max_body_size=9).max_body_size == 9


HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
NOTHING = [[]] * 66_000
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/chat/completions", {**HI, "metadata": {"a": NOTHING}}, 413, None),
        ("/v1/chat/completions", {**HI, "chat_template_kwargs": {"a": NOTHING}}, 413, None),
        ("/v1/chat/completions", {**HI, "colour": NOTHING}, 413, None),
        ("/v1/chat/completions", {**HI, "chat_template_kwargs": {"a": DEEP}}, 400, None),
        (
            "/v1/chat/completions",
            {**HI, "chat_template_kwargs": dict.fromkeys(map(str, range(300)))},
            400,
            "chat_template_kwargs",
        ),
        ("/v1/chat/completions", {**HI, "metadata": dict.fromkeys(map(str, range(300)))}, 400, "metadata"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 600}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 4000}] * 2}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 600}, 400, "messages"),
        ("/tokenize", {"prompt": "a" * 7000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a" * 7000}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["Hi", "a" * 7000]}, 400, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 5000}, 400, "prompt"),
        ("/detokenize", {"tokens": [1] * 100_000}, 413, None),
        ("/detokenize", {"tokens": [1] * 90_000 + [700]}, 400, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_no_prompt_needs_is_refused(
    small: RunningServer, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    """Before any of it is encoded, and most of it before any of it is an object."""
    assert error_of(small.post(path, **body), status)["param"] == param
    assert small.post("/v1/completions", prompt="Hi", max_tokens=1).status_code == 200


@pytest.fixture
def small(llms: Engines) -> Iterator[RunningServer]:
    with running(llms["tiny"], max_body_size=2**18) as server:
        yield server


@contextmanager
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bodies of more than 10,000 bytes are not parsed until the block ends; lengths of those that have begun."""
    go_on, begun = threading.Event(), list[int]()
    parse = json_body.from_json

    def wait_and_parse(content: bytes, **options: Any) -> Any:
        if len(content) > 10_000:
            begun.append(len(content))
            assert go_on.wait(60)
        return parse(content, **options)

    monkeypatch.setattr(json_body, "from_json", wait_and_parse)
    try:
        yield begun
    finally:
        go_on.set()


@pytest.mark.parametrize("size", [30_000, 100_000])
def test_a_long_body_holds_up_nobody(server: RunningServer, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    with ThreadPoolExecutor(4) as clients:
        with blocked(monkeypatch) as begun:
            long = [clients.submit(server.post, "/tokenize", prompt="a" * size) for _ in range(4)]
            wait_until(lambda: len(begun) >= 2)
            assert server.post("/v1/completions", prompt="Saturday", max_tokens=2).status_code == 200
            assert not any(one.done() for one in long)
        assert [error_of(one.result(), 400)["param"] for one in long] == ["prompt"] * 4


def test_work_for_a_client_that_has_gone_is_never_begun(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two long bodies have the threads for such; a third waits for one, and its client leaves."""
    with ThreadPoolExecutor(2) as clients:
        with blocked(monkeypatch) as begun:
            long = [clients.submit(server.post, "/tokenize", prompt="a" * 100_000) for _ in range(2)]
            wait_until(lambda: len(begun) == 2)
            connections = len(server.connections)
            with server.connect("/tokenize", prompt="a" * 200_000):
                wait_until(lambda: len(server.connections) == connections + 1)
                wait_until(lambda: server.service.workers._large._work_queue.qsize() == 1)
            wait_until(lambda: len(server.connections) == connections)
        assert [error_of(one.result(), 400)["param"] for one in long] == ["prompt"] * 2
        error_of(server.post("/tokenize", prompt="a" * 150_000), 400)
        assert [size // 1000 for size in begun] == [100, 100, 150]


def test_a_client_that_leaves_while_its_prompt_waits_leaves_its_room(
    llms: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(llms["tiny"], max_queue=0) as server, ThreadPoolExecutor(2) as clients:
        go_on = threading.Event()
        for _ in range(2):
            server.service.workers._large.submit(go_on.wait, 60)
        monkeypatch.setattr(json_body, "_SMALL", 2**20)  # parsed at once: what waits is the encoding
        with server.connect("/v1/completions", prompt=["a" * 100_000, "b"], n=4):
            wait_until(lambda: server.engine.open_requests == 8)
            assert error_of(server.post("/v1/completions", prompt="Hi"), 429)["code"] == "overloaded"
        wait_until(lambda: server.engine.open_requests == 0)
        assert server.post("/v1/completions", prompt="Hi", max_tokens=1).status_code == 200
        go_on.set()
        assert clients


def test_bodies_there_is_no_memory_for(llms: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of those that are held together have a limit too; short requests are little of it."""
    with running(llms["tiny"], max_body_size=100_000) as server, ThreadPoolExecutor(70) as clients:
        with blocked(monkeypatch):
            long = [clients.submit(server.post, "/tokenize", prompt="a" * 99_000) for _ in range(70)]
            wait_until(lambda: sum(one.done() for one in long) >= 6)
            refused = [one.result() for one in long if one.done()]
            assert {error_of(one, 429)["code"] for one in refused} == {"overloaded"}
            assert server.post("/v1/completions", prompt="Hi", max_tokens=1).status_code == 200
        answered = [one.result() for one in long if one.result().status_code != 429]
        assert len(answered) == 64
        assert error_of(server.post("/tokenize", prompt="a" * 99_000), 400)["param"] == "prompt"


def test_memory_comes_back(llms: Engines) -> None:
    """Forty bodies, each of which takes some 15 MB as Python objects."""
    body = {"messages": HI["messages"], "max_tokens": 1, "metadata": {"a": [[]] * 45_000}, "colour": [{}] * 45_000}
    with serving(llms["tiny"].engine.path, "--port", 0) as server, ThreadPoolExecutor(4) as clients:
        ask = partial(httpx.post, f"{server.url}/v1/chat/completions", timeout=60)
        assert ask(json=HI).status_code == 200
        before = _resident(server.process.pid)
        for answer in clients.map(lambda _: ask(json=body), range(40)):
            assert answer.headers.get("x-ignored-fields") == "colour", answer.text[:300]
        assert _resident(server.process.pid) - before < 128 * 2**20


def _resident(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


REST = b"Host: x\r\nX-Long: "
UNREAD = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "begin",
    [b"", b"GET /health HTTP/1.1\r\n" + REST, WHOLE + b"GET /health HTTP/1.1\r\n" + REST, UNREAD],
    ids=["nothing", "head", "second head", "body of an answered request"],
)
@pytest.mark.parametrize("drips", [False, True])
def test_a_connection_that_asks_nothing_is_closed(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, begin: bytes, drips: bool
) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.5)
    with socket.create_connection(address(server)) as client:
        client.sendall(begin)
        client.settimeout(0.02)
        for _ in range(3000):
            try:
                if drips and begin:
                    client.sendall(b"a")
                if not client.recv(4096):
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
        else:
            raise AssertionError("it may stay for a minute")


def test_a_request_that_takes_long_is_not(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_HEAD_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as clients, server.paused():
        answer = clients.submit(server.post, "/v1/completions", prompt="Saturday", max_tokens=2)
        wait_until(lambda: server.engine.open_requests == 1)
        time.sleep(0.5)
    assert answer.result().status_code == 200


def address(server: RunningServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)
