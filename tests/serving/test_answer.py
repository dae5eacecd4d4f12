"""What a call's reader gets, whenever it looks."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.scheduler import Emission
from dflash_trt.serving.answer import Answer, ShuttingDown
from tests.runtime.test_scheduler import request


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_every_token_and_every_end_once_and_in_order(turns: list[tuple[int, bool]]) -> None:
    """The reader looks after some of the turns, each a token of one of three requests."""
    requests = [request([7], 50) for _ in range(3)]

    async def read() -> tuple[list[int], list[int]]:
        answer, tokens, ended = Answer(requests), [], []
        for token, (which, looks) in enumerate(turns):
            answer.emit(Emission(requests[which], token, "", drafted=False))
            if looks:
                tokens += [emission.token for emission in (await anext(answer)).emissions]
        for one in requests:
            answer.end(one)
        async for progress in answer:
            tokens += [emission.token for emission in progress.emissions]
            ended += [requests.index(one) for one in progress.ended]
        return tokens, ended

    assert asyncio.run(read()) == (list(range(len(turns))), [0, 1, 2])


def test_a_reader_that_waits_is_told_that_nothing_comes() -> None:
    one = request([7], 50)

    async def read() -> list[int]:
        answer, tokens = Answer([one]), []
        asyncio.get_running_loop().call_later(0.01, answer.emit, Emission(one, 5, "", drafted=False))
        asyncio.get_running_loop().call_later(0.02, answer.give_up)
        with pytest.raises(ShuttingDown):
            async for progress in answer:
                tokens += [emission.token for emission in progress.emissions]
        return tokens

    assert asyncio.run(read()) == [5]


def test_what_has_ended_is_read_though_the_engine_ended_since() -> None:
    one = request([7], 50)

    async def read() -> list[int]:
        answer = Answer([one])
        answer.emit(Emission(one, 5, "", drafted=False))
        answer.end(one)
        answer.give_up()
        return [emission.token async for progress in answer for emission in progress.emissions]

    assert asyncio.run(read()) == [5]
