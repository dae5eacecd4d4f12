"""Clients that vanish or do not read, and an engine that fails: what it costs the others, and when it ends."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Emission
from tests.conftest import Engines
from tests.serving.running_server import RunningServer, running, wait_until
from tests.serving.server_process import refused, serving

LONG: dict[str, Any] = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
FAILING = """
from dflash_trt.runtime.scheduler import Scheduler
step, steps = Scheduler.step, iter(range(5))
def fail(self):
    if next(steps, None) is None:
        raise ValueError("the fifth step\\nwas the last")
    return step(self)
Scheduler.step = fail
import sys
from dflash_trt.cli.main import main
sys.exit(main())
"""
HANGING = """
from threading import Event, Timer
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.serving import engine_thread
start = engine_thread.EngineThread.start
def start_what_hangs(self):
    def hang(scheduler):
        Timer(0.2, self.fail, [RuntimeError("rank 1 has ended")]).start()
        Event().wait()
    Scheduler.step = hang
    start(self)
engine_thread.EngineThread.start = start_what_hangs
engine_thread._PATIENCE = 0.1
import sys
from dflash_trt.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_has_no_slot_two_steps_later(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    scheduler = server.engine._scheduler
    step, busy = scheduler.step, []

    def counted() -> list[Emission]:
        emissions = step()
        busy.append(scheduler.holds_slots)
        return emissions

    monkeypatch.setattr(scheduler, "step", counted)
    client = server.connect("/v1/completions", **LONG, stream=stream, n=3)
    wait_until(lambda: len(scheduler.running) == 3)
    with server.paused():
        taken = len(busy)
        client.close()
        wait_until(lambda: not server.engine._commands.empty())
    wait_until(lambda: server.slots_in_use == 0)
    assert busy[taken - 1]
    assert False in busy[taken : taken + 2]
    assert not server.engine._answers


def test_a_client_that_does_not_read_costs_no_more_than_its_own_answer(server: RunningServer, alone: LLM) -> None:
    """It holds up nobody, and what it leaves unread waits as tokens; little of it is text yet."""
    (expected,) = alone.generate(["On Monday"], SamplingParams(max_tokens=60))[0].outputs
    slow = {"stream": True, "n": 8, "return_token_sources": True, "stream_options": {"include_usage": True}}
    slow["stream_options"] |= {"continuous_usage_stats": True}  # type: ignore[operator]
    with server.connect("/v1/completions", **LONG, **slow):
        wait_until(lambda: server.engine.open_requests == 8)
        for _ in range(3):
            answer = server.post("/v1/completions", prompt="On Monday", max_tokens=60, temperature=0).json()
            assert answer["choices"][0]["text"] == expected.text
        wait_until(lambda: not server.engine._answers)
        (unread,) = server.engine._open
        assert 0 < len(unread._held.emissions) <= 8 * LONG["max_tokens"]
        written = [connection.transport.get_write_buffer_size() for connection in server.connections]
        assert 0 < max(written) < 2 * 65536, "more than asyncio lets wait"
        assert server.slots_in_use == 0
        events = server.events("/v1/completions", prompt="On Monday", max_tokens=60, temperature=0)
        assert "".join(event["choices"][0]["text"] for event in events) == expected.text
    wait_until(lambda: server.engine.open_requests == 0)


def test_an_engine_that_fails_tells_all_that_wait(llms: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llms["tiny"]) as server:
        answers: list[httpx.Response] = []
        ask = lambda: answers.append(server.post("/v1/completions", **LONG, n=9))  # noqa: E731
        client = threading.Thread(target=ask)
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            with server.paused():
                client.start()
                wait_until(lambda: len(server.engine._answers) == 10)
                monkeypatch.setattr(server.engine._scheduler, "step", lambda: 1 // 0)
            *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        client.join(60)
        assert done == "[DONE]" and json.loads(error)["error"]["code"] == "engine_failed"
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [(500, "engine_failed")]
        assert server.post("/v1/completions", **LONG).status_code == 503
        for path in ("/health", "/metrics"):
            assert server.http.get(path).status_code == 503
        assert isinstance(server.engine.failure, ZeroDivisionError)
        assert server.engine.open_requests == 0


def test_a_server_whose_engine_fails_ends_and_says_why(llms: Engines) -> None:
    with serving(llms["tiny"].engine.path, "--port", 0, program=FAILING) as server:
        response = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
        status, lines = server.end()
    assert status == 1
    assert lines == [
        "dflash-trt: internal error, ValueError: the fifth step was the last (--debug before the command shows where)"
    ]


def test_a_server_whose_engine_hangs_ends_when_that_is_known_to_have_failed(llms: Engines) -> None:
    with serving(llms["tiny"].engine.path, "--port", 0, program=HANGING) as server:
        response = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
        status, (line,) = server.end()
    assert status == 1 and "rank 1 has ended" in line


def test_sigterm_under_load_cuts_no_answer(llms: Engines, alone: LLM) -> None:
    """More are asked for than there are slots: the first wait for all of their outputs, the others read streams."""
    whole = {**LONG, "max_tokens": 200, "n": 8}
    sampled: dict[str, Any] = {"prompt": "On Monday", "max_tokens": 60, "temperature": 0.8, "seed": 3, "n": 2}
    outputs = alone.generate(["On Monday"], SamplingParams(max_tokens=60, temperature=0.8, seed=3, n=2))[0].outputs
    begun = threading.Semaphore(0)

    def read() -> list[str]:
        texts = [""] * len(outputs)
        with httpx.stream("POST", url, json={**sampled, "stream": True}, timeout=60) as response:
            begun.release()
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events.pop() == "[DONE]"
        for choice in (choice for event in events for choice in json.loads(event)["choices"]):
            texts[choice["index"]] += choice["text"]
        return texts

    with serving(llms["tiny"].engine.path, "--port", 0) as server, ThreadPoolExecutor(8) as clients:
        url = f"{server.url}/v1/completions"
        first = [clients.submit(httpx.post, url, json=whole, timeout=60) for _ in range(2)]
        wait_until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 16})
        others = [clients.submit(read) for _ in range(6)]
        assert all(begun.acquire(timeout=60) for _ in others)
        assert not any(client.done() for client in others), "they wait behind the first"
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refused(server.url))
        assert [client.result(60) for client in others] == [[output.text for output in outputs]] * len(others)
        for answer in (client.result(60) for client in first):
            assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8 * 200)
        assert server.end() == (0, [])
