"""What a server says of itself, and tokens for clients that count them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dflash_trt import __version__
from dflash_trt.runtime.llm import LLM
from tests.serving.running_server import DIARY, MESSAGES, RunningServer

TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}


def test_models(server: RunningServer) -> None:
    (model,) = server.openai.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "dflash-trt")
    assert server.openai.models.retrieve("tiny") == model
    assert server.http.get("/v1/models/tiny").json()["max_model_len"] == 512


def test_health_and_version(server: RunningServer) -> None:
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ping").status_code == server.http.post("/ping").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/v1/models/tiny", "/"]
)
def test_head_is_get_without_a_body(server: RunningServer, path: str) -> None:
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert server.http.head("/v1/completions").status_code == 405


def test_tokenize_and_back(server: RunningServer, alone: LLM) -> None:
    ids = alone.tokenizer.encode(DIARY)
    answer = server.post("/tokenize", prompt=DIARY, return_token_strs=True).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == 512
    assert "".join(answer["token_strs"]) == DIARY
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": DIARY}
    conversation = server.post("/tokenize", messages=MESSAGES, add_special_tokens=None, tools=None).json()
    assert conversation["tokens"] == alone.encode_chat(MESSAGES)


def test_tokenize_refuses(server: RunningServer) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "tools": [TOOL]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{**TOOL, "type": "custom"}]}, "tools[0].type"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a" * 7000}, "prompt"),
    ]
    for path, body, param in cases:
        response: httpx.Response = server.post(path, **body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
