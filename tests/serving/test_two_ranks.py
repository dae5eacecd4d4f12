"""Serving an engine of two ranks: the answers are those of one rank, and a rank that dies takes the server with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.runtime.llm import LLM
from tests.conftest import TINY
from tests.serving.running_server import MESSAGES, RunningServer, running, wait_until
from tests.serving.server_process import Process, serving

LONG: dict[str, Any] = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
DIED = "rank 1 of 2 was ended by SIGKILL"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair for two ranks."""
    config = BuildConfig(dtype="float64", max_batch_size=4, max_seq_len=512, max_num_tokens=64, tp_size=2)
    directory = tmp_path_factory.mktemp("two") / "engine"
    return build_engine(open_target(TINY / "target"), open_drafter(TINY / "drafter"), config, directory).path


@pytest.fixture
def server(engine: Path) -> Iterator[Process]:
    """Whose rank is seen to be gone in the end."""
    with serving(engine, "--port", 0) as server:
        [rank] = ranks_of(server)
        yield server
    wait_until(lambda: not rank.is_running())


def ranks_of(server: Process) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(server.process.pid).children()
    return children


def assert_ended(server: Process) -> None:
    status, lines = server.end()
    assert status == 1
    assert len(lines) == 1 and lines[0].startswith("dflash-trt: ") and DIED in lines[0], lines


def answers(server: RunningServer) -> list[Any]:
    """Of many clients at once, without what differs from call to call."""
    sampled = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "n": 2, "max_tokens": 60}
    bodies: list[dict[str, Any]] = [
        {"messages": MESSAGES, "temperature": 0, "max_tokens": 80},
        {"messages": MESSAGES, **sampled},
        {"messages": MESSAGES, **sampled, "repetition_penalty": 1.2, "verify_window": 1},
        {"prompt": ["Saturday", "On Monday"], **sampled, "top_k": 7, "verify_window": 4},
        {"prompt": "Saturday", "temperature": 1.2, "seed": 2, "max_tokens": 60, "stop": [" the"], "ignore_eos": True},
        {"prompt": "Saturday", "temperature": 0, "frequency_penalty": 0.5, "max_tokens": 60, "verify_window": 8},
    ]

    def ask(body: dict[str, Any]) -> Any:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = server.post(path, **body, return_token_sources=True).json()
        for choice in answer["choices"]:
            choice["token_sources"] = [source["text"] for source in choice["token_sources"]]
        return answer["choices"], answer["usage"]

    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(ask, bodies))


def test_two_ranks_answer_as_one_does(engine: Path, alone: LLM) -> None:
    """Token for token; which of them were guessed depends on windows, and so on time."""
    with running(alone) as server:
        expected = answers(server)
    with LLM(engine, device="cpu") as llm, running(llm) as server:
        assert llm.engine.config.build_config.tp_size == 2
        assert answers(server) == expected


def test_a_rank_that_dies_ends_a_server_at_work(server: Process) -> None:
    """Some clients have some of their outputs, and one is told them as they come; it comes before those that wait."""
    url = f"{server.url}/v1/completions"
    with ThreadPoolExecutor() as others:
        waiting = [others.submit(httpx.post, url, json={**LONG, "n": 8}, timeout=60) for _ in range(5)]
        wait_until(lambda: httpx.get(f"{server.url}/load").json() == {"server_load": 40})
        with httpx.stream("POST", url, json={**LONG, "stream": True, "priority": -1}, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            ranks_of(server)[0].kill()
            *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        assert (json.loads(error)["error"]["code"], done) == ("engine_failed", "[DONE]")
        refusals = {(answer.result(60).status_code, _code(answer.result())) for answer in waiting}
        assert refusals == {(500, "engine_failed")}
    assert_ended(server)


def test_a_rank_that_dies_while_nothing_is_asked_ends_the_server(server: Process) -> None:
    ranks_of(server)[0].kill()
    assert_ended(server)


def _code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])
