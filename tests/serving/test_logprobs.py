"""Log-probabilities in OpenAI's shapes are those of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.sampling import SamplingParams
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
