"""A server on a real socket, for tests of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn

from dflash_trt.runtime.llm import LLM
from dflash_trt.serving.app import create_app
from dflash_trt.serving.server import bind, configuration
from dflash_trt.serving.service import Service
from dflash_trt.serving.settings import ServerSettings
from dflash_trt.serving.snapshot import Snapshot

DIARY = "Write the diary of Bruno the teacher, who seeks the golden boat. Begin on Saturday in the market."
MESSAGES: list[Any] = [{"role": "user", "content": DIARY}]


class RunningServer:
    """A server in a thread of this process, and its clients."""

    def __init__(self, url: str, service: Service, key: str, connections: set[Any]) -> None:
        self.url = url
        self.service = service
        self.engine = service.engine
        self.connections = connections
        """Uvicorn's, each with its transport."""
        self.http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"})
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Post a body of JSON."""
        return self.http.post(path, json=body)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream, seen to end in [DONE]."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def connect(self, path: str, **body: Any) -> socket.socket:
        """Ask on a socket that nobody reads."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = self.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
        return client

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine takes no step during the block."""
        there, go_on = threading.Event(), threading.Event()

        def pause() -> None:
            there.set()
            assert go_on.wait(60)

        self.engine._commands.put(pause)
        assert there.wait(60)
        try:
            yield
        finally:
            go_on.set()

    @property
    def slots_in_use(self) -> int:
        """Slots that are taken, and requests that wait for one."""
        with self.paused():
            snapshot: Snapshot = self.engine._look()
            return snapshot.running + snapshot.waiting


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait half a minute at most."""
    for _ in range(6000):
        if holds():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it never came")


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[RunningServer]:
    """Serve an engine until the block ends."""
    app = create_app(llm, ServerSettings(**{"model_name": "tiny", **settings}))
    with bind("127.0.0.1", 0) as bound:
        server = uvicorn.Server(configuration(app))
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a client that does not read is soon felt
        bound.listen()
        connections = server.server_state.connections
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        client = RunningServer(url, app.state.service, (settings.get("api_keys") or ["none"])[0], connections)
        try:
            yield client
        finally:
            client.http.close()
            client.openai.close()
            server.should_exit = True
            thread.join()
