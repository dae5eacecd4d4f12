"""A server on a real socket, for tests of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import uvicorn

from dflash_trt.runtime.llm import LLM
from dflash_trt.serving.app import create_app
from dflash_trt.serving.engine_thread import EngineThread
from dflash_trt.serving.server import bind
from dflash_trt.serving.settings import ServerSettings


class RunningServer:
    """A server in a thread of this process."""

    def __init__(self, url: str, engine: EngineThread, key: str) -> None:
        self.url = url
        self.engine = engine
        self.http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"})
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, max_retries=0)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def running(llm: LLM, **settings: Any) -> Iterator[RunningServer]:
    """Serve an engine until the block ends."""
    app = create_app(llm, ServerSettings(**{"model_name": "tiny", **settings}))
    with bind("127.0.0.1", 0) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
        bound.listen()
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        try:
            yield RunningServer(url, app.state.service.engine, (settings.get("api_keys") or ["none"])[0])
        finally:
            server.should_exit = True
            thread.join()
