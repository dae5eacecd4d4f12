"""Log-probabilities in OpenAI's shapes are those of the engine."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.tokens import TokenTexts
from tests.serving.running_server import DIARY, MESSAGES, RunningServer

LENGTH = 24
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": LENGTH}


def token_text(llm: LLM, token: int) -> str:
    return str(llm.tokenizer.decode([token]))


@pytest.fixture(scope="module")
def expected(alone: LLM) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens of the answer, and what the engine says of each."""
    params = SamplingParams(**SAMPLED, logprobs=3)
    output = alone.generate([alone.encode_chat(MESSAGES)], params)[0].outputs[0]
    assert output.logprobs is not None
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_of_chat(
    server: RunningServer, alone: LLM, expected: tuple[list[int], list[TokenLogprobs]], stream: bool
) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **SAMPLED, "logprobs": True, "top_logprobs": 3}
    entries: list[Any] = []
    if stream:
        for chunk in server.openai.chat.completions.create(**body, stream=True):
            entries += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    else:
        logprobs = server.openai.chat.completions.create(**body).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        entries += logprobs.content
    assert len(entries) == len(expected[0])
    for entry, token, found in zip(entries, *expected, strict=True):
        said = [(entry.token, entry.bytes, entry.logprob)]
        said += [(other.token, other.bytes, other.logprob) for other in entry.top_logprobs]
        meant = [(token, found.logprob), *found.top]
        for (text, content, logprob), (other, value) in zip(said, meant, strict=True):
            assert text == token_text(alone, other) and content == list(text.encode())
            assert logprob == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("stream", [False, True])
def test_of_plain_completions(server: RunningServer, alone: LLM, stream: bool) -> None:
    (output,) = alone.generate([DIARY], SamplingParams(**SAMPLED, logprobs=2))[0].outputs
    body: dict[str, Any] = {"model": "tiny", "prompt": DIARY, **SAMPLED, "logprobs": 2}
    if stream:
        choices = [chunk.choices[0] for chunk in server.openai.completions.create(**body, stream=True)]
    else:
        choices = [server.openai.completions.create(**body).choices[0]]
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens, values, tops, offsets = (
        [each for part in parts for each in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert tokens == [token_text(alone, token) for token in output.token_ids]
    assert values == pytest.approx([found.logprob for found in output.logprobs or ()], abs=1e-9)
    for text, top, found in zip(tokens, tops, output.logprobs or (), strict=True):
        likely = {token_text(alone, token): value for token, value in found.top}
        assert top == pytest.approx({**likely, text: found.logprob}, abs=1e-9)
    for offset, text in zip(offsets, tokens, strict=True):
        if text != "<|endoftext|>":
            assert output.text[offset:].startswith(text)


def test_only_the_chosen_token(server: RunningServer) -> None:
    chat = server.post("/v1/chat/completions", messages=MESSAGES, **SAMPLED, logprobs=True).json()
    assert all(entry["top_logprobs"] == [] for entry in chat["choices"][0]["logprobs"]["content"])
    plain = server.post("/v1/completions", prompt=DIARY, **SAMPLED, logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in plain["top_logprobs"]] == [[token] for token in plain["tokens"]]
    assert server.post("/v1/chat/completions", messages=MESSAGES, **SAMPLED).json()["choices"][0]["logprobs"] is None


def test_tokens_that_are_parts_of_characters_have_their_bytes(server: RunningServer, alone: LLM) -> None:
    """Two tokens of one character, each made certain by a bias where the other has been."""
    first, second = alone.tokenizer.encode("é", add_special_tokens=False)
    entries = []
    for token in (first, second):
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1, "logit_bias": {str(token): 100}}
        answer = server.post("/v1/chat/completions", **body, logprobs=True).json()
        entries += answer["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "é".encode()
    assert all(entry["token"] == "\N{REPLACEMENT CHARACTER}" for entry in entries)


def emission(token: int, logprob: float, top: tuple[tuple[int, float], ...], offset: int = 0) -> Emission:
    return Emission(cast("Request", None), token, "", False, TokenLogprobs(logprob, top), offset)


def test_alternatives_that_are_parts_of_characters_are_told_apart(alone: LLM) -> None:
    r"""OpenAI's `bytes:\xe2\x96` for tokens that are no whole text; the chosen token is there whatever else is."""
    texts = TokenTexts(alone.tokenizer)
    first, second = alone.tokenizer.encode("é", add_special_tokens=False)
    plain = alone.tokenizer.encode("a", add_special_tokens=False)[0]
    padding = len(alone.tokenizer) + 5
    top = ((plain, -0.5), (first, -1.0), (second, -2.0), (padding, -3.0), (padding + 1, float("-inf")))
    said = texts.in_completion([emission(first, -1.0, top, 3), emission(padding, -7.0, top[:4], 3)], 10)
    bytes_of = [f"bytes:\\x{byte:02x}" for byte in "é".encode()]
    assert said["tokens"] == [bytes_of[0], ""]
    assert said["top_logprobs"][0] == {"a": -0.5, bytes_of[0]: -1.0, bytes_of[1]: -2.0, "": -3.0}
    assert said["top_logprobs"][1][""] == -7.0, "the chosen token's own"
    assert said["text_offset"] == [13, 13]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text_while_some_is_held_back(
    server: RunningServer, alone: LLM, stream: bool
) -> None:
    """Every beginning of a word may begin the stop text, which never comes."""
    words = alone.generate([DIARY], SamplingParams(max_tokens=40))[0].outputs[0].text.split(" ")
    stop = [f" {word}\N{CRAB}" for word in words if word]
    body: dict[str, Any] = {"prompt": DIARY, "temperature": 0, "max_tokens": 40, "logprobs": 0}
    if stream:
        choices = [event["choices"][0] for event in server.events("/v1/completions", **body, stop=stop)]
    else:
        choices = server.post("/v1/completions", **body, stop=stop).json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens, offsets = ([each for part in parts for each in part[name]] for name in ("tokens", "text_offset"))
    assert len(tokens) > 20
    for token, offset in zip(tokens, offsets, strict=True):
        assert text.startswith(token, offset) or token == "<|endoftext|>"
