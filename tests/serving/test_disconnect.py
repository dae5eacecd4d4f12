"""Clients that go away."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.running_server import RunningServer, wait_until

LONG: dict[str, Any] = {"prompt": "Saturday", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_a_client_that_is_gone_are_cancelled(server: RunningServer, stream: bool) -> None:
    with server.paused():
        with server.connect("/v1/completions", **LONG, stream=stream, n=3):
            wait_until(lambda: server.engine.open_requests == 3)
        wait_until(lambda: not stream or server.engine.open_requests in (0, 3))
    wait_until(lambda: server.engine.open_requests == 0)
    wait_until(lambda: server.slots_in_use == 0)


def test_a_stream_that_is_cut_frees_its_slot(server: RunningServer) -> None:
    with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
    wait_until(lambda: server.engine.open_requests == 0)
    wait_until(lambda: server.slots_in_use == 0)
    text = server.http.get("/metrics").text
    (cancelled,) = (line for line in text.splitlines() if 'request_success_total{finished_reason="cancelled"' in line)
    assert float(cancelled.split()[-1]) >= 1
