"""Room for requests, and the ends of the thread, over an executor without a model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from dflash_trt.serving import engine_thread
from dflash_trt.serving.answer import Progress, ShuttingDown
from dflash_trt.serving.engine_thread import EngineThread, QueueFull
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import expected_output, request

MOST = 6


@asynccontextmanager
async def started(
    may_step: Callable[[], None] = lambda: None, on_progress: Callable[[Progress], None] = lambda _: None
) -> AsyncIterator[EngineThread]:
    engine = EngineThread(
        Scheduler(SimulatedExecutor(2), FixedWindow(4)),
        most_requests=MOST,
        may_step=may_step,
        on_arrival=lambda _: None,
        on_progress=on_progress,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def outputs(engine: EngineThread, count: int, prompt: int) -> list[list[int]]:
    """Of one call, which prepares for a while."""
    with engine.room(count):
        await asyncio.sleep(0.001)
        requests = [request([prompt], 9, seed=seed) for seed in range(count)]
        answer = engine.submit(requests)
    with engine.answering(answer):
        async for _ in answer:
            assert engine.open_requests <= MOST
    return [one.output for one in requests]


@given(st.lists(st.integers(0, MOST), min_size=1, max_size=12))
@settings(max_examples=30)
def test_calls_that_come_at_once_share_the_room(counts: list[int]) -> None:
    """Each gets all of its outputs, or is refused before it prepares; what there was room for was not refused."""

    async def ask() -> list[list[list[int]] | BaseException]:
        async with started() as engine:
            calls = [outputs(engine, count, prompt) for prompt, count in enumerate(counts, 10)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert engine.open_requests == 0
            return found

    left = MOST
    for (prompt, count), got in zip(enumerate(counts, 10), asyncio.run(ask()), strict=True):
        if count > left:
            assert isinstance(got, QueueFull)
        else:
            assert got == [expected_output([prompt], 9, seed) for seed in range(count)]
            left -= count


def test_answers_that_nobody_has_read_are_open() -> None:
    async def ask() -> None:
        async with started() as engine:
            with engine.room(MOST):
                answer = engine.submit([request([10 + index], 5) for index in range(MOST)])
            while any(one.finish_reason is None for one in answer.requests):
                await asyncio.sleep(0.001)
            with pytest.raises(QueueFull, match=f"{MOST} requests are open, {MOST} may be"), engine.room(1):
                pass
            engine.leave(answer)
            assert await outputs(engine, 1, 20) == [expected_output([20], 9)]

    asyncio.run(ask())


def test_a_call_that_is_being_prepared_when_the_end_begins_is_in_flight() -> None:
    async def ask() -> None:
        async with started() as engine:
            call = asyncio.create_task(outputs(engine, 2, 10))
            while not engine.open_requests:
                await asyncio.sleep(0)
            await engine.drain(60)
            assert call.done() and call.result() == [expected_output([10], 9, seed) for seed in range(2)]
            with pytest.raises(ShuttingDown), engine.room(1):
                raise AssertionError("there is none any more")

    asyncio.run(ask())


def test_a_call_that_is_prepared_after_the_last_moment_is_refused() -> None:
    async def ask() -> None:
        async with started() as engine:
            with engine.room(1):
                await engine.drain(0)
                with pytest.raises(ShuttingDown):
                    engine.submit([request([10], 5)])

    asyncio.run(ask())


def test_what_cannot_be_told_of_ends_the_engine() -> None:
    """Else its readers would wait for ever."""

    def lose(progress: Progress) -> None:
        raise ValueError("nobody can count this")

    async def ask() -> None:
        async with started(on_progress=lose) as engine:
            with engine.room(1):
                answer = engine.submit([request([10], 5)])
            with pytest.raises(ShuttingDown):
                await asyncio.wait_for(anext(answer), 10)
            assert engine.failed.is_set() and str(engine.failure) == "nobody can count this"
            with pytest.raises(ShuttingDown):
                await asyncio.wait_for(engine.snapshot(), 10)

    asyncio.run(ask())


@pytest.mark.parametrize("fails", [False, True])
def test_what_steps_made_is_read_though_the_next_one_hangs_or_fails(fails: bool) -> None:
    """The second comes too soon after the first to be told of at once."""
    made, goes_on, steps = threading.Event(), threading.Event(), iter(range(2))

    def two_steps() -> None:
        if next(steps, None) is None:
            made.set()
            if fails:
                raise ValueError("the third step")
            goes_on.wait(60)

    async def ask() -> list[int]:
        async with started(two_steps) as engine:
            with engine.room(1):
                answer = engine.submit([request([10], 40)])
            await asyncio.to_thread(made.wait, 60)
            read: list[int] = []
            while len(read) < len(answer.requests[0].output):
                read += [each.token for each in (await asyncio.wait_for(anext(answer), 10)).emissions]
            if fails:
                with pytest.raises(ShuttingDown):
                    await asyncio.wait_for(anext(answer), 10)
            assert read == answer.requests[0].output
            goes_on.set()
            return read

    read = asyncio.run(ask())
    assert read == expected_output([10], 40)[: len(read)] and 2 < len(read) < 40


def test_an_engine_that_is_failed_from_outside_while_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a rank that has died, whose answer the pass waits for: readers are told at once, and the end comes."""
    monkeypatch.setattr(engine_thread, "_PATIENCE", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(60)

    async def told(wait: Awaitable[object]) -> None:
        with pytest.raises(ShuttingDown):
            await asyncio.wait_for(wait, 10)

    async def ask() -> EngineThread:
        async with started(hang) as engine:
            with engine.room(1):
                answer = engine.submit([request([10], 5)])
            await asyncio.to_thread(hangs.wait, 60)
            waiting = [asyncio.create_task(told(anext(answer))), asyncio.create_task(told(engine.snapshot()))]
            await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.fail, RuntimeError("rank 1 has ended"))
            await asyncio.gather(*waiting)
            assert engine.failed.is_set() and str(engine.failure) == "rank 1 has ended"
            with pytest.raises(ShuttingDown), engine.room(1):
                raise AssertionError("there is none any more")
            began = time.monotonic()
        assert time.monotonic() - began < 30, "stop has not waited for the thread"
        return engine

    engine = asyncio.run(ask())
    assert engine._thread.is_alive()
    goes_on.set()
    engine._thread.join(60)
    assert not engine._thread.is_alive()
