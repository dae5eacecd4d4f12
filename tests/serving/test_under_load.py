"""Sixty-four clients at once: each gets what a one-at-a-time run gives, or a beginning of it where it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any

import openai

from dflash_trt.runtime.generation import CompletionOutput
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import Engines
from tests.serving.running_server import RunningServer, running, wait_until
from tests.serving.test_metrics import samples

NAMES = ["Bruno the teacher", "Hilda the baker", "the old fisherman", "Otto the guard"]
STARTS = ["Saturday", "On Monday in the harbour", "Write the diary of", "The golden boat"]
HOW = ["whole", "stream", "cut", "whole", "stream", "gone"]
"""How a client takes its answer: at once; as a stream, to its end or cut early; not at all."""
CONVERSATIONS, CONTINUATIONS = 40, 24


@dataclass(frozen=True)
class Client:
    """What one asks, and how it takes the answer."""

    number: int
    messages: list[Any] | None
    prompt: str
    how: str
    params: dict[str, Any]
    ours: dict[str, Any]
    """Fields that OpenAI does not have."""

    @classmethod
    def of(cls, number: int) -> Client:
        """The same every time."""
        draw = Random(number)
        text = f"{draw.choice(STARTS)} {draw.choice(NAMES)}" + draw.choice(["", ", who seeks the map."])
        messages = [{"role": "user", "content": text}] if number < CONVERSATIONS else None
        how = HOW[number % len(HOW)]
        params: dict[str, Any] = {
            "temperature": draw.choice([0.0, 0.0, 0.7, 1.2]),
            "seed": draw.randrange(2**63 - 8),
            "n": draw.choice([1, 1, 1, 2, 3]),
            "max_tokens": 150 if how in ("cut", "gone") else draw.choice([1, 2, 9, 30, 60]),
            "top_p": draw.choice([1.0, 0.9]),
        }
        params |= draw.choice([{}, {"stop": ["the", " b"]}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.5}])
        ours: dict[str, Any] = draw.choice(
            [{}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"ignore_eos": True}]
        )
        return cls(number, messages, text, how, params, ours)

    @property
    def scheduling(self) -> dict[str, Any]:
        """What no answer depends on."""
        window = self.number % 9
        return {"priority": self.number % 3} | ({"verify_window": window} if window else {})

    def expected(self, alone: LLM, messages: list[Any] | None) -> list[CompletionOutput]:
        """Of a run that has the engine to itself."""
        params = SamplingParams(**self.params, **self.ours)
        prompt = self.prompt if messages is None else alone.encode_chat(messages)
        return [alone.generate([prompt], one)[0].outputs[0] for one in params.each()]


@dataclass
class Taken:
    """What a client got of one answer."""

    texts: list[str]
    reasons: list[str | None]
    tokens: int | None = None


class Load:
    """The clients at work."""

    def __init__(self, server: RunningServer) -> None:
        self._openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240, max_retries=0)
        self._server = server
        self._streaming = asyncio.Event()
        """Some client has had a chunk."""

    async def run(self, clients: list[Client]) -> list[list[Taken]]:
        """What each got: of its question, and of the question after that."""
        outputs = sum(client.params["n"] for client in clients)
        async with self._openai:
            with self._server.paused():
                tasks = [asyncio.create_task(self._converse(client)) for client in clients]
                while self._server.engine.open_requests < outputs:
                    assert not any(task.done() for task in tasks)
                    await asyncio.sleep(0.005)
            return await asyncio.gather(*tasks)

    async def _converse(self, client: Client) -> list[Taken]:
        first = await self._take(client, client.messages)
        if client.messages is None or client.how in ("cut", "gone"):
            return [first]
        return [first, await self._take(client, following(client.messages, first.texts[0]))]

    async def _take(self, client: Client, messages: list[Any] | None) -> Taken:
        taken = Taken([""] * client.params["n"], [None] * client.params["n"])
        if client.how == "gone":
            asking = asyncio.create_task(self._create(client, messages, stream=False))
            await self._streaming.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        elif client.how == "whole":
            answer = await self._create(client, messages, stream=False)
            self._add(taken, answer, "message")
        else:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await self._create(client, messages, **options)
            await self._read(taken, stream, chunks=3 if client.how == "cut" else None)
        return taken

    async def _create(self, client: Client, messages: list[Any] | None, **options: Any) -> Any:
        common = {"model": "tiny", **client.params, **options, "extra_body": {**client.ours, **client.scheduling}}
        if messages is None:
            return await self._openai.completions.create(prompt=client.prompt, **common)
        return await self._openai.chat.completions.create(messages=messages, **common)

    async def _read(self, taken: Taken, stream: AsyncIterator[Any], chunks: int | None) -> None:
        async for chunk in stream:
            self._streaming.set()
            self._add(taken, chunk, "delta")
            if chunks is not None and (chunks := chunks - 1) == 0:
                await stream.close()  # type: ignore[attr-defined]
                return

    def _add(self, taken: Taken, part: Any, name: str) -> None:
        for choice in part.choices:
            text = choice.text if hasattr(choice, "text") else getattr(choice, name).content
            taken.texts[choice.index] += text or ""
            taken.reasons[choice.index] = choice.finish_reason
        if part.usage is not None:
            taken.tokens = part.usage.completion_tokens


def following(messages: list[Any], answer: str) -> list[Any]:
    """The conversation's next question."""
    return [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "And on Sunday?"}]


def test_every_client_gets_what_it_would_get_alone(llms: Engines, alone: LLM) -> None:
    clients = [Client.of(number) for number in range(CONVERSATIONS + CONTINUATIONS)]
    with running(llms["tiny"]) as server:
        taken = asyncio.run(Load(server).run(clients))
        wait_until(lambda: server.slots_in_use == 0)
        wait_until(lambda: server.engine.open_requests == 0 and not server.engine._answers)
        found = samples(server)

    finished = tokens = asked = 0
    for client, answers in zip(clients, taken, strict=True):
        messages = client.messages
        for answer in answers:
            expected = client.expected(alone, messages)
            asked += len(expected)
            if client.how in ("cut", "gone"):
                assert all(whole.text.startswith(text) for whole, text in zip(expected, answer.texts, strict=True))
                continue
            assert answer.texts == [output.text for output in expected], client
            assert answer.reasons == [output.finish_reason for output in expected], client
            assert answer.tokens == sum(len(output.token_ids) for output in expected), client
            finished, tokens = finished + len(expected), tokens + answer.tokens
            messages = following(messages or [], answer.texts[0])

    assert any(
        text for client, answers in zip(clients, taken, strict=True) if client.how == "cut" for text in answers[0].texts
    )
    ended = {
        dict(labels)["finished_reason"]: count for (name, labels), count in found.items() if "success_total" in name
    }
    assert sum(ended.values()) == asked == found["dflash_trt:e2e_request_latency_seconds_count", ()]
    assert finished <= ended["stop"] + ended["length"]
    assert tokens <= found["dflash_trt:generation_tokens_total", ()]
    assert found["dflash_trt:prefix_cache_hits_total", ()] > 0
    assert found["dflash_trt:num_requests_running", ()] == found["dflash_trt:num_requests_waiting", ()] == 0
    assert found["dflash_trt:kv_cache_usage_perc", ()] == 0
