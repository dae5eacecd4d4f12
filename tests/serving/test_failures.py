"""A request that fails tells its client why, and no other is touched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_trt.runtime.llm import LLM
from tests.conftest import Engines
from tests.serving.running_server import RunningServer, running

POISON = 9
"""A token whose embedding is no number."""


@pytest.fixture(scope="module")
def server(llms: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory: Path = tmp_path_factory.mktemp("poisoned") / "engine"
    shutil.copytree(llms["llama"].engine.path, directory)
    file = directory / "target/rank0.safetensors"
    weights = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, file, metadata)
    with running(LLM(directory, device="cpu")) as server:
        yield server


def test_whole_and_streamed(server: RunningServer) -> None:
    body = {"prompt": [3, POISON, 4], "temperature": 0, "max_tokens": 8}
    response = server.post("/v1/completions", **body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "internal_server_error", "internal_error")
    assert "not finite" in error["message"] and "\n" not in error["message"]
    *_, event = server.events("/v1/completions", **body)
    assert event == {"error": error}
    with pytest.raises(openai.InternalServerError, match="not finite"):
        server.openai.completions.create(model="tiny", prompt=[3, POISON, 4], max_tokens=8)
    with pytest.raises(openai.APIError, match="not finite"):
        list(server.openai.completions.create(model="tiny", prompt=[3, POISON, 4], max_tokens=8, stream=True))


def test_others_go_on(server: RunningServer) -> None:
    prompt = [3, 5, 4]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logit_bias": {str(POISON): -100}}
    body = {**params, "ignore_eos": True}
    before = server.post("/v1/completions", prompt=prompt, **body).json()["choices"][0]["text"]
    with server.paused():
        streams = [
            server.openai.completions.create(
                model="tiny", prompt=ids, stream=True, **params, extra_body={"ignore_eos": True}
            )
            for ids in (prompt, [3, POISON, 4])
        ]
    assert "".join(chunk.choices[0].text for chunk in streams[0]) == before
    with pytest.raises(openai.APIError, match="not finite"):
        list(streams[1])
    assert server.post("/v1/completions", prompt=prompt, **body).json()["choices"][0]["text"] == before
    assert server.http.get("/health").status_code == 200
