"""Parameters that change what may be chosen reach the engine, by the official client where it has them."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.serving.chat_protocol import ChatRequest
from dflash_trt.serving.completion_protocol import CompletionRequest
from dflash_trt.serving.protocol import CommonRequest
from tests.serving.running_server import DIARY, MESSAGES, RunningServer


def test_logit_bias(server: RunningServer, alone: LLM) -> None:
    prompt = alone.encode_chat(MESSAGES)
    (plain,) = alone.generate([prompt], SamplingParams(max_tokens=30))[0].outputs
    bias = {plain.token_ids[2]: -100.0, plain.token_ids[7]: 3.5}
    (output,) = alone.generate([prompt], SamplingParams(max_tokens=30, logit_bias=bias))[0].outputs
    assert output.text != plain.text
    given: Any = {str(token): value for token, value in bias.items()}
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    answer = server.openai.chat.completions.create(**body, logit_bias=given)
    assert answer.choices[0].message.content == output.text


def test_min_tokens(server: RunningServer, alone: LLM) -> None:
    prompt = "This is the diary of Bruno the teacher"
    ends = str(alone.engine.config.pretrained_config.eos_token_ids[0])
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 20, "logit_bias": {ends: 100}}
    choice = server.post("/v1/completions", **body).json()
    assert choice["usage"]["completion_tokens"] == 1 and choice["choices"][0]["finish_reason"] == "stop"
    choice = server.post("/v1/completions", **body, min_tokens=7).json()
    assert choice["usage"]["completion_tokens"] == 8 and choice["choices"][0]["finish_reason"] == "stop"


def test_negative_seeds_are_those_above_all_others(server: RunningServer) -> None:
    def text(seed: int) -> str:
        body = {"prompt": "Saturday", "max_tokens": 12, "ignore_eos": True, "seed": seed}
        return str(server.post("/v1/completions", **body).json()["choices"][0]["text"])

    assert text(-5) == text(2**63 - 5) != text(5)
    assert text(-(2**63)) == text(0) != text(-1)
    response = server.post("/v1/completions", prompt="Saturday", seed=-(2**63) - 1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_null_is_as_absent(server: RunningServer, path: str) -> None:
    kind: type[CommonRequest] = CompletionRequest if path == "/v1/completions" else ChatRequest
    prompt = {"prompt": "Saturday"} if kind is CompletionRequest else {"messages": MESSAGES}
    body: dict[str, Any] = {**prompt, "seed": 4, "max_tokens": 20, "temperature": 0.7}
    optional = kind.model_fields.keys() - prompt.keys()
    assert len(optional) > 25
    for name in sorted(optional - {"seed"}):
        without = {key: value for key, value in body.items() if key != name}
        answers = [server.post(path, **each) for each in (without, {**without, name: None})]
        assert [answer.status_code for answer in answers] == [200, 200], (name, answers[1].text)
        assert answers[0].json()["choices"] == answers[1].json()["choices"], name
    greedy = {**body, "temperature": 0, "seed": None}
    assert server.post(path, **greedy).json()["usage"]["completion_tokens"] > 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"697": 1}}, "logit_bias[697]"),
        ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
        ({"logit_bias": {"697": 1, "hello": 1, "-1": 1}}, "logit_bias"),
        ({"logit_bias": {"3": "much"}}, "logit_bias.3"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": [1_000_000]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({f"field{index}": 0 for index in range(300)}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals_name_the_field(server: RunningServer, change: dict[str, Any], param: str | None) -> None:
    for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "Hi"})):
        response = server.post(f"/v1/{path}", **prompt, **{"max_tokens": 8, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("window", [1, None])
def test_min_tokens_holds_stop_texts_back(server: RunningServer, alone: LLM, window: int | None) -> None:
    (whole,) = alone.generate([DIARY], SamplingParams(max_tokens=40))[0].outputs
    start = len(alone.tokenizer.decode(whole.token_ids[:12]))
    body = {"prompt": DIARY, "temperature": 0, "max_tokens": 40, "min_tokens": 12, "stop": " ", "verify_window": window}
    expected = whole.text[: whole.text.index(" ", start)]
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    streamed = [each["choices"][0]["text"] for each in server.events("/v1/completions", **body)]
    assert "".join(streamed) == expected


def test_special_tokens_stop(server: RunningServer) -> None:
    body = {"prompt": DIARY, "temperature": 0, "max_tokens": 200}
    (ended,) = server.post("/v1/completions", **body).json()["choices"]
    (cut,) = server.post("/v1/completions", **body, ignore_eos=True, stop=["<|endoftext|>"]).json()["choices"]
    assert cut == ended and cut["finish_reason"] == "stop"
