"""Plain completions by the official client."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.serving.running_server import DIARY, RunningServer


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_every_form_of_prompt(server: RunningServer, alone: LLM, form: str) -> None:
    ids = alone.tokenizer.encode(DIARY)
    prompt: Any = {"text": DIARY, "texts": [DIARY, "Saturday."], "ids": ids, "lists of ids": [ids, ids[:5]]}[form]
    prompts: Any = prompt if form in ("texts", "lists of ids") else [prompt]
    expected = [each.outputs[0] for each in alone.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))]
    answer = server.openai.completions.create(
        model="tiny", prompt=prompt, temperature=0, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in expected]
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(prompts)
    assert answer.object == "text_completion" and answer.usage is not None
    assert answer.usage.completion_tokens == 16 * len(prompts), "OpenAI's default is 16 tokens"


def test_several_prompts_of_several_outputs(server: RunningServer, alone: LLM) -> None:
    prompts = [DIARY, "Saturday."]
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 12}
    generation = alone.generate(prompts, SamplingParams(**params))
    texts = [output.text for each in generation for output in each.outputs]
    answer = server.openai.completions.create(model="tiny", prompt=prompts, **params)
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in generation)

    streamed = [""] * 4
    for chunk in server.openai.completions.create(model="tiny", prompt=prompts, stream=True, **params):
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: RunningServer, stream: bool) -> None:
    body = {"prompt": DIARY, "temperature": 0, "max_tokens": 8}
    plain = server.post("/v1/completions", **body).json()["choices"][0]["text"]
    if stream:
        events = server.events("/v1/completions", **body, echo=True)
        echoed = "".join(choice["text"] for event in events for choice in event["choices"])
    else:
        echoed = server.post("/v1/completions", **body, echo=True).json()["choices"][0]["text"]
    assert echoed == DIARY + plain


def test_tokens_without_text_are_in_no_chunk_but_are_counted(server: RunningServer) -> None:
    body = {"prompt": DIARY, "temperature": 1.5, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    options = {"include_usage": True}
    *events, last = server.events("/v1/completions", **body, stream_options=options)
    assert last["usage"]["completion_tokens"] == 60
    *tokens, end = (event["choices"][0] for event in events)
    assert all(choice["text"] for choice in tokens)
    assert (end["text"], end["finish_reason"]) == ("", "length")
