"""A server as its users start it, and users who each send their next request when the last answer is whole.

The server has a core of its own, users have the others: what they do with an answer does not slow the next.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
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

_LENGTHS = random.Random(0).choices(range(50, 151), k=97)
"""Of requests in turn, in hundredths of the length asked for: users who end together would begin together again."""


@contextmanager
def server(engine: Path, *options: str) -> Iterator[str]:
    """`dflash-trt serve` in a process of its own, with this process's environment; its address."""
    its_core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SystemExit("one core is too few: the server needs one, and its users another")
    command = [Path(sys.executable).with_name("dflash-trt"), "serve", str(engine), "--port", "0", *options]
    os.sched_setaffinity(0, {its_core})  # of this thread, which the server inherits
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    os.sched_setaffinity(0, others)
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
        os.sched_setaffinity(0, {its_core, *others})


@dataclass(frozen=True)
class Answer:
    """What one user saw of one request. Times are `time.perf_counter`'s."""

    tokens: int
    asked: float
    pieces: list[float]
    """When each piece of text came."""
    ended: float
    """When the stream did."""
    speculation: dict[str, Any]
    """What the server says of its drafts."""

    @property
    def seconds(self) -> float:
        """From the question to the end."""
        return self.ended - self.asked

    @property
    def first_token(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.asked

    @property
    def longest_gap(self) -> float:
        """Seconds between two pieces, at most; 0 of a single one."""
        return max((after - before for before, after in pairwise(self.pieces)), default=0.0)

    def tokens_before(self, moment: float) -> float:
        """Those that had come by then, if all pieces are alike: nothing more is told of a piece than its text."""
        return self.tokens * sum(piece <= moment for piece in self.pieces) / len(self.pieces)


@dataclass(frozen=True)
class Load:
    """What all users saw."""

    answers: list[Answer]
    began: float
    first_free: float
    """When a user found no prompt left: from then on there are fewer."""

    @property
    def throughput(self) -> float:
        """Output tokens of all users a second, while all are there."""
        tokens = sum(answer.tokens_before(self.first_free) for answer in self.answers)
        return tokens / (self.first_free - self.began)

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
    asked = time.perf_counter()
    pieces: list[float] = []
    last: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                came, last = time.perf_counter(), json.loads(line.removeprefix("data: "))
                if any(choice["text"] for choice in last["choices"]):
                    pieces.append(came)
    ended = time.perf_counter()
    return Answer(last["usage"]["completion_tokens"], asked, pieces or [ended], ended, last["speculation"])


async def closed_loop(
    client: httpx.AsyncClient,
    model: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    users: int,
    **fields: Any,
) -> Load:
    """`users` at once, who share the prompts out; outputs have half to one and a half of `max_tokens`."""
    left = enumerate(prompts)
    answers: list[Answer] = []

    async def user() -> None:
        for index, prompt in left:
            length = max_tokens * _LENGTHS[index % len(_LENGTHS)] // 100
            answers.append(await ask(client, model, prompt, length, **fields))

    began = time.perf_counter()
    tasks = [asyncio.create_task(user()) for _ in range(users)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    first_free = time.perf_counter()
    await asyncio.gather(*tasks)
    return Load(answers, began, first_free)
