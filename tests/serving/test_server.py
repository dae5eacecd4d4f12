"""`dflash-trt serve` as a process: how it starts, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from dflash_trt.serving.server import bind
from tests.cli.invoke import invoke
from tests.conftest import Engines
from tests.serving.server_process import refused, serving

LONG: dict[str, Any] = {
    "prompt": "Saturday",
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_answers_in_flight_end_whole_after_sigterm(llms: Engines) -> None:
    engine = llms["tiny"].engine.path
    with serving(engine, "--port", 0, "--served_model_name", "diarist") as server:
        assert server.name == "diarist" and server.lines == [
            "where a request does not say: temperature 1.0",
            *server.lines[1:],
        ]
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            while not refused(server.url):
                pass
            events = [line.removeprefix("data: ") for line in (first, *lines) if line]
        assert events.pop() == "[DONE]"
        assert json.loads(events[-1])["usage"]["completion_tokens"] == 400
        assert server.end() == (0, [])


def test_what_does_not_end_in_time_is_cut(llms: Engines) -> None:
    with serving(llms["tiny"].engine.path, "--port", 0, "--drain_timeout", "0") as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 500}, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGINT)
            *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "shutting_down"
        assert server.end() == (0, [])


def test_a_second_signal_ends_it_at_once(llms: Engines) -> None:
    with serving(llms["tiny"].engine.path, "--port", 0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({**LONG, "max_tokens": 500, "n": 8}).encode()
        with socket.create_connection((host, int(port))) as client:  # which does not read
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            while httpx.get(f"{server.url}/load").json() == {"server_load": 0}:
                pass
            server.process.send_signal(signal.SIGTERM)
            while not refused(server.url):
                pass
            server.process.send_signal(signal.SIGTERM)
            assert server.end()[0] == -signal.SIGTERM


def test_limits_and_origins(llms: Engines) -> None:
    origins = ("--allowed_origins", "https://a.example, https://b.example", "--allowed_origins", "http://c.example")
    with serving(llms["tiny"].engine.path, "--port", 0, *origins) as server:
        assert f"longest request body: {2**20 + 32 * 512} bytes" in server.lines
        for origin in ("https://a.example", "https://b.example", "http://c.example"):
            response = httpx.head(f"{server.url}/health", headers={"Origin": origin})
            assert response.headers["access-control-allow-origin"] == origin


def test_keys_of_the_environment(llms: Engines) -> None:
    with serving(llms["tiny"].engine.path, "--port", 0, DFLASH_TRT_API_KEY="one two") as server:
        statuses = [
            httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in ("one", "two", "one two", "three")
        ]
        assert statuses == [200, 200, 401, 401]


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--api_key", ""], None),
        (["--api_key", "a", "--api_key", ""], None),
        ([], ""),
        ([], "  "),
        (["--api_key", ""], "a"),
    ],
    ids=str,
)
def test_an_empty_key_opens_nothing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    environment: str | None,
) -> None:
    if environment is not None:
        monkeypatch.setenv("DFLASH_TRT_API_KEY", environment)
    result = invoke(capsys, "serve", tmp_path, "--port", 0, *options)
    (line,) = result.err.splitlines()
    assert result.status == 2 and "--api_key, or DFLASH_TRT_API_KEY, is empty" in line


def test_mistakes_at_the_start(llms: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = llms["tiny"].engine.path
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        result = invoke(capsys, "serve", engine, "--port", port)
        assert result.status == 2 and f"--port {port}: cannot be served at (Address already in use)" in result.err
    for arguments, said in (
        ([tmp_path / "none", "--port", 0], "is no engine directory"),
        ([engine, "--host", "192.0.2.1"], "--host 192.0.2.1"),
        ([engine, "--port", 0, "--verify_window", 9], "verify_window is 9"),
        ([engine, "--port", 70000], "70000"),
        ([engine, "--port", 0, "--max_queue", -1], "max_queue"),
        ([engine, "--port", 0, "--allowed_origins", "https://a.example,b.example"], "--allowed_origins 'b.example'"),
        ([engine, "--port", 0, "--allowed_origins", "https://a.example/"], "--allowed_origins 'https://a.example/'"),
        ([engine, "--port", 0, "--allowed_origins", ""], "--allowed_origins ''"),
    ):
        result = invoke(capsys, "serve", *arguments)
        assert result.status == 2 and said in result.err and len(result.err.splitlines()) <= 3, result.err
