"""The scheduler's bookkeeping, over an executor whose caches hold tokens."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.errors import UserError
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.runtime.simulated_executor import VOCAB_SIZE, SimulatedExecutor, following

STOP = {1, 2, 3, 4, 5}


class Silent:
    """Detokenizes to nothing."""

    text, length, stopped = "", 0, False

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def request(
    prompt: list[int],
    max_tokens: int,
    *,
    seed: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    limit: int = 64,
) -> Request:
    silent: Any = Silent()
    return Request(
        prompt,
        SamplingParams(max_tokens=max_tokens, seed=seed),
        limit=limit,
        stop_token_ids=STOP,
        detokenizer=silent,
        vocab_size=VOCAB_SIZE,
        priority=priority,
        deadline=deadline,
    )


def expected_output(prompt: list[int], max_tokens: int, seed: int = 0) -> list[int]:
    """What the request gives alone."""
    output: list[int] = []
    while len(output) < min(max_tokens, 64 - len(prompt)):
        output.append(following(prompt + output, seed))
        if output[-1] in STOP:
            break
    return output


def run(scheduler: Scheduler) -> list[Request]:
    """Step until nothing is left; requests in the order of their first tokens."""
    order: dict[Request, None] = {}
    while not scheduler.idle:
        order |= dict.fromkeys(emission.request for emission in scheduler.step())
    return list(order)


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12), st.integers(1, 70)), max_size=12
)


@given(REQUESTS, st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=200)
def test_no_token_is_lost_doubled_or_misplaced(
    arrivals: list[tuple[list[int], int]], max_batch_size: int, window: int
) -> None:
    executor = SimulatedExecutor(max_batch_size)
    scheduler = Scheduler(executor, FixedWindow(window))
    requests = [request(prompt, max_tokens) for prompt, max_tokens in arrivals]
    half = len(requests) // 2
    scheduler.add(requests[:half])
    emitted: dict[int, list[int]] = {id(one): [] for one in requests}
    late = requests[half:]
    while late or not scheduler.idle:
        if late:
            scheduler.add([late.pop(0)])
        before = {id(one): len(one.output) for one in scheduler.running}
        for emission in scheduler.step():
            emitted[id(emission.request)].append(emission.token)
        assert len(scheduler.running) <= max_batch_size
        assert all(len(one.output) > before.get(id(one), 0) for one in scheduler.running), "a request starves"
    for one, (prompt, max_tokens) in zip(requests, arrivals, strict=True):
        assert one.output == emitted[id(one)] == expected_output(prompt, max_tokens)
        assert one.finish_reason is not None
    assert scheduler.target_passes == len(executor.passes)


def test_first_come_first_served() -> None:
    scheduler = Scheduler(SimulatedExecutor(2), FixedWindow(4))
    requests = [request([i], 40) for i in range(10, 16)]
    scheduler.add(requests)
    assert run(scheduler) == requests


def test_lower_priority_numbers_go_first() -> None:
    scheduler = Scheduler(SimulatedExecutor(1), FixedWindow(4))
    requests = [request([10 + i], 20, priority=priority) for i, priority in enumerate((1, 0, 2, 0, 1, -3))]
    scheduler.add(requests)
    assert run(scheduler) == [requests[i] for i in (5, 1, 3, 0, 4, 2)]


def test_emissions_tell_drafted_tokens() -> None:
    scheduler = Scheduler(SimulatedExecutor(1), FixedWindow(4))
    one = request([10], 20)
    scheduler.add([one])
    drafted = 0
    while not scheduler.idle:
        drafted += sum(emission.drafted for emission in scheduler.step())
    assert drafted == one.statistics.accepted_tokens > 0
    assert one.statistics.decoded_tokens == one.statistics.verifications + drafted


def test_a_long_prompt_stalls_nobody_for_more_than_a_chunk() -> None:
    executor = SimulatedExecutor(3, max_num_tokens=4, max_seq_len=400)
    scheduler = Scheduler(executor, FixedWindow(1))
    short, long = request([10], 150, limit=400), request(list(range(100, 400)), 1, limit=400)
    scheduler.add([short, long])
    scheduler.step()
    executor.passes.clear()
    for chunk in range(1, 75):
        emissions = scheduler.step()
        assert [emission.request for emission in emissions] == [short]
        assert [each.q_len for each in executor.passes] == [[4], [1]]
        executor.passes.clear()
        assert scheduler.prefilling is not None and scheduler.prefilling.kv_len == 4 * chunk
    assert long in {emission.request for emission in scheduler.step()}


def test_short_prompts_share_a_step() -> None:
    """As many as a chunk has room for, so that slots are not empty while others wait for theirs."""
    executor = SimulatedExecutor(16, max_num_tokens=10)
    scheduler = Scheduler(executor, FixedWindow(1))
    prompts = [list(range(20, 20 + length)) for length in (4, 3, 3, 1, 10, 2, 30, 1)]
    scheduler.add(request(prompt, 30) for prompt in prompts)
    lengths = []
    while scheduler.waiting or scheduler.prefilling:
        executor.passes.clear()
        scheduler.step()
        lengths.append([each.q_len for each in executor.passes][:-1])
    assert lengths == [[[4], [3], [3]], [[1]], [[10]], [[2]], [[10]], [[1]], [[10]], [[10]]]


@pytest.mark.parametrize("chunk", [9, 15, 100, 400])
def test_no_more_than_eight_prompts_share_a_step(chunk: int) -> None:
    """Each is a pass that others wait for, and a pass of few tokens takes as long as one of many."""
    executor = SimulatedExecutor(16, max_num_tokens=chunk)
    scheduler = Scheduler(executor, FixedWindow(1))
    scheduler.add(request([20], 30, seed=index) for index in range(12))
    scheduler.step()
    shared = len(executor.passes) - 1
    assert len(scheduler.running) == shared == (8 if chunk > 15 else -(-chunk // 2))
    scheduler.step()
    assert len(scheduler.running) == min(12, 2 * shared)


def test_a_prompt_under_way_moves_to_the_hole_before_it() -> None:
    executor = SimulatedExecutor(3, max_num_tokens=4)
    scheduler = Scheduler(executor, FixedWindow(4))
    first, second, third = request([20], 40), request([21], 40), request(list(range(30, 50)), 9)
    scheduler.add([first, second, third])
    for _ in range(4):
        scheduler.step()
    scheduler.cancel(first)
    scheduler.step()
    assert scheduler.running == [second] and scheduler.prefilling is not None and scheduler.prefilling.slot == 2
    run(scheduler)
    assert second.output == expected_output([21], 40)
    assert third.output == expected_output(list(range(30, 50)), 9)


@pytest.mark.parametrize("steps", range(8))
def test_cancelled_anywhere(steps: int) -> None:
    """While it waits, in the middle of its prompt, and while it decodes."""
    scheduler = Scheduler(SimulatedExecutor(1, max_num_tokens=4), FixedWindow(1))
    before, one, after = request([10], 2), request(list(range(20, 32)), 50), request([11], 2)
    scheduler.add([before, one, after])
    for _ in range(steps):
        scheduler.step()
    scheduler.cancel(one)
    output = one.output
    emissions = scheduler.step()
    assert one in scheduler.ended and one not in {emission.request for emission in emissions}
    run(scheduler)
    assert one.finish_reason == "cancelled"
    assert one.output == output == expected_output(one.prompt, 50)[: len(output)]
    assert after.output == expected_output([11], 2)
    assert len(output) == max(0, 2 * (steps >= 4) + steps - 4)


def test_an_ended_request_cannot_be_cancelled() -> None:
    scheduler = Scheduler(SimulatedExecutor(1), FixedWindow(4))
    one = request([10], 3)
    scheduler.add([one])
    run(scheduler)
    scheduler.cancel(one)
    scheduler.step()
    assert one.finish_reason == "length" and scheduler.ended == []


def test_deadlines_end_what_waits_and_what_runs() -> None:
    now = 0.0
    scheduler = Scheduler(SimulatedExecutor(1), FixedWindow(1), clock=lambda: now)
    running, waiting, other = request([10], 50, deadline=5.0), request([11], 50, deadline=2.0), request([12], 2)
    scheduler.add([running, waiting, other])
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        assert scheduler.step()[0].request == running
        assert scheduler.ended == ([waiting] if now == 2.0 else [])
    output = running.output
    now = 5.0
    assert {emission.request for emission in scheduler.step()} == {other}
    assert running.finish_reason == waiting.finish_reason == "deadline"
    assert running.output == output and waiting.output == []


def test_refuses_what_a_slot_cannot_hold() -> None:
    scheduler = Scheduler(SimulatedExecutor(1, max_seq_len=32), FixedWindow(4))
    scheduler.add([request([10], 31)])
    with pytest.raises(UserError, match="a request of up to 33 tokens does not fit the engine's max_seq_len of 32"):
        scheduler.add([request([10], 32)])
    run(scheduler)


def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    """Four come for one that can be let in, so that most are late or cancelled while they wait, some while they run."""
    now = 0.0
    executor = SimulatedExecutor(8)
    scheduler = Scheduler(executor, FixedWindow(4), clock=lambda: now)
    ended, served, objects, waited = 0, 0, [], 0
    while now < 25_000 or not scheduler.idle:
        if now < 25_000:
            come = [request([10 + i], 1 + i, priority=i % 2, deadline=now + 50 * i + 2) for i in range(4)]
            scheduler.add(come)
            scheduler.cancel(come[int(now) % 4])
        now += 1.0
        scheduler.step()
        executor.passes.clear()
        ended += len(scheduler.ended)
        served += sum(one.finish_reason == "length" for one in scheduler.ended)
        waited = max(waited, len(scheduler.waiting))
        if now % 5_000 == 0:
            objects.append(len(gc.get_objects()))
    assert ended == 100_000 and served > 20_000
    assert waited < 600
    assert max(objects) - min(objects) < 5_000, objects


@pytest.mark.parametrize("slots", [0, 3])
def test_more_slots_than_there_are_are_refused(slots: int) -> None:
    with pytest.raises(UserError, match=f"max_batch_size is {slots}.* 2$"):
        Scheduler(SimulatedExecutor(2), FixedWindow(1), max_batch_size=slots)
