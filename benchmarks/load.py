"""A server as its users start it, and users who each send their next request when the last answer is whole."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx


@contextmanager
def server(engine: Path, *options: str) -> Iterator[str]:
    """`dflash-trt serve` in a process of its own, with this process's environment; its address."""
    command = [Path(sys.executable).with_name("dflash-trt"), "serve", str(engine), "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise SystemExit(f"the server ended with status {process.wait()}")
        yield found.group()
    finally:
        process.terminate()
        process.communicate()


@dataclass(frozen=True)
class Answer:
    """What one user saw of one request."""

    tokens: int
    seconds: float
    first_token: float
    """Seconds to the first piece of text."""
    longest_gap: float
    """Seconds between two pieces, at most; 0 of a single one."""
    speculation: dict[str, Any]
    """What the server says of its drafts."""


@dataclass(frozen=True)
class Load:
    """What all users saw."""

    answers: list[Answer]
    seconds: float

    @property
    def throughput(self) -> float:
        """Output tokens of all users a second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def interactivity(self) -> float:
        """Output tokens that a user gets a second, on average."""
        return sum(answer.tokens / answer.seconds for answer in self.answers) / len(self.answers)

    @property
    def acceptance_length(self) -> float:
        """Tokens of a verification that had guesses, its own included; 1 where none had."""
        drafts = sum(answer.speculation["num_spec_steps"] for answer in self.answers)
        accepted = sum(answer.speculation["num_accepted_draft_tokens"] for answer in self.answers)
        return 1 + accepted / drafts if drafts else 1.0


async def ask(client: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
    """Stream one greedy completion of exactly `max_tokens` tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_speculation": True,
        **fields,
    }
    started = time.perf_counter()
    times: list[float] = []
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - started)
                last = json.loads(line.removeprefix("data: "))
    gaps = [after - before for before, after in pairwise(times)]
    tokens = last["usage"]["completion_tokens"]
    return Answer(tokens, times[-1], times[0], max(gaps, default=0.0), last["speculation"])


async def closed_loop(
    client: httpx.AsyncClient,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    users: int,
    **fields: Any,
) -> Load:
    """`users` at once, who share the prompts out."""
    left = iter(prompts)
    answers: list[Answer] = []

    async def user() -> None:
        for prompt in left:
            answers.append(await ask(client, model, prompt, max_tokens, **fields))

    started = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    return Load(answers, time.perf_counter() - started)
