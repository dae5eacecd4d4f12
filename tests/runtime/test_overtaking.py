"""Short prompts, and those of which the caches have all but a little, run before the rest of a long one."""

from __future__ import annotations

import pytest

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.slots import Prefill, Slots
from dflash_trt.runtime.window import FixedWindow
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import expected_output, request, run

HISTORY, DOCUMENT = list(range(100, 120)), list(range(300, 340))


def test_a_short_prompt_overtakes_a_long_one() -> None:
    executor = SimulatedExecutor(3, max_num_tokens=4)
    scheduler = Scheduler(executor, FixedWindow(1))
    long = request(list(range(100, 140)), 3)
    scheduler.add([long])
    scheduler.step()
    short = [request([50 + index], 30, seed=index) for index in range(4)]
    scheduler.add(short)
    assert short[0] in {emission.request for emission in scheduler.step()}
    executor.passes.clear()
    scheduler.step()
    assert executor.passes[0].q_len == [4], "the long one has the turn after that"
    run(scheduler)
    assert long.output == expected_output(long.prompt, 3)
    assert [one.output for one in short] == [expected_output([50 + index], 30, seed=index) for index in range(4)]


def test_short_prompts_do_not_starve_a_long_one() -> None:
    scheduler = Scheduler(SimulatedExecutor(4, max_num_tokens=2), FixedWindow(1))
    long = request(list(range(100, 120)), 1)
    scheduler.add([long])
    for _ in range(2 * 10):
        scheduler.add([request([50], 1)])
        scheduler.step()
    assert long.finish_reason is not None


def test_a_less_urgent_prompt_does_not_overtake() -> None:
    scheduler = Scheduler(SimulatedExecutor(4, max_num_tokens=2), FixedWindow(1))
    scheduler.add([request(list(range(100, 120)), 1, priority=0)])
    scheduler.step()
    scheduler.add([request([50], 1, priority=1)])
    assert [scheduler.step() for _ in range(8)] == [[]] * 8


def keeping(slots: int) -> tuple[Scheduler, SimulatedExecutor]:
    """A scheduler that keeps what has ended, chunks of four tokens."""
    executor = SimulatedExecutor(slots, max_num_tokens=4, max_seq_len=64)
    return Scheduler(executor, FixedWindow(1), reuse_prefixes=True), executor


def converse(scheduler: Scheduler, prompt: list[int]) -> list[int]:
    """Tokens of a conversation whose first turn is over."""
    first = request(prompt, 3)
    scheduler.add([first])
    run(scheduler)
    return first.tokens


@pytest.mark.parametrize("slots", [3, 4, 8])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_next_turn_of_a_long_conversation_overtakes(slots: int, others: int) -> None:
    """Whatever else is kept, and wherever, so long as the conversation is."""
    scheduler, executor = keeping(slots)
    for index in range(others):
        converse(scheduler, [200 + index, 201, 202])
    history = converse(scheduler, HISTORY)
    long = request(DOCUMENT, 1)
    scheduler.add([long])
    scheduler.step()
    turn = request([*history, 7, 8], 4)
    scheduler.add([turn])
    executor.passes.clear()
    assert {emission.request for emission in scheduler.step()} == {turn}
    assert executor.passes[0].q_len == [3], "the last token of the first turn, and the two new ones"
    run(scheduler)
    assert turn.output == expected_output(turn.prompt, 4)
    assert long.output == expected_output(DOCUMENT, 1)


def test_one_that_shares_a_prompt_with_what_runs_overtakes() -> None:
    scheduler, _ = keeping(4)
    running, long = request(HISTORY, 40), request(DOCUMENT, 1)
    scheduler.add([running])
    while not running.output:
        scheduler.step()
    scheduler.add([long])
    scheduler.step()
    like = request([*HISTORY, 7], 2, seed=3)
    scheduler.add([like])
    assert like in {emission.request for emission in scheduler.step()}
    run(scheduler)
    assert like.output == expected_output(like.prompt, 2, seed=3)


def test_one_that_shares_a_little_does_not_overtake() -> None:
    scheduler, _ = keeping(4)
    history = converse(scheduler, HISTORY)
    long, other = request(DOCUMENT, 1), request([*history, *range(50, 55)], 1)
    scheduler.add([long])
    scheduler.step()
    scheduler.add([other])
    assert [scheduler.step() for _ in range(8)] == [[]] * 8
    assert {emission.request for emission in scheduler.step()} == {long}


def test_turns_of_conversations_do_not_starve_a_long_prompt() -> None:
    scheduler, _ = keeping(4)
    history = converse(scheduler, HISTORY)
    long = request(DOCUMENT, 1)
    scheduler.add([long])
    turns: list[Request] = []
    for index in range(2 * len(DOCUMENT) // 4):
        turns.append(request([*history, 7 + index], 1))
        scheduler.add(turns[-1:])
        scheduler.step()
    assert long.finish_reason is not None
    run(scheduler)
    assert [one.output for one in turns] == [expected_output(one.prompt, 1) for one in turns]


def test_none_overtakes_whose_history_would_have_to_go() -> None:
    """With two slots a long prompt cannot make way: what is kept is still there when the turn that needs it has come."""
    scheduler, executor = keeping(2)
    history = converse(scheduler, HISTORY)
    long, turn = request(DOCUMENT, 1), request([*history, 7, 8], 2)
    scheduler.add([long])
    scheduler.step()
    scheduler.add([turn])
    assert [scheduler.step() for _ in range(8)] == [[]] * 8
    executor.passes.clear()
    run(scheduler)
    assert [each.q_len for each in executor.passes] == [[4], [3], [1]]
    assert long.output == expected_output(DOCUMENT, 1) and turn.output == expected_output(turn.prompt, 2)


def test_a_history_that_went_while_its_turn_waited_holds_up_nobody() -> None:
    """What came short and is no more runs as the long prompt that it is by then."""
    scheduler, _ = keeping(3)
    history = converse(scheduler, HISTORY)
    long, turn = request(DOCUMENT, 1), request([*history, 7], 2, priority=1)
    several = [request([200 + index], 40) for index in range(3)]
    scheduler.add([turn, *several])
    for _ in range(4):
        scheduler.step()
    assert len(scheduler.kept) == 0 and len(scheduler.running) == 3
    scheduler.cancel(several[0])
    scheduler.cancel(several[1])
    scheduler.add([request(DOCUMENT, 1, priority=1), long])
    for _ in range(10):
        assert turn not in {emission.request for emission in scheduler.step()}
    run(scheduler)
    assert turn.output == expected_output(turn.prompt, 2) and long.output == expected_output(DOCUMENT, 1)


def test_nobody_looks_through_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is looked at when it comes, and once more at most before its turn."""
    looks: list[Request] = []
    whole = Slots.is_short

    def counted(slots: Slots, request: Request, *, before: Prefill | None = None) -> bool:
        looks.append(request)
        return whole(slots, request, before=before)

    monkeypatch.setattr(Slots, "is_short", counted)
    scheduler, _ = keeping(2)
    history = converse(scheduler, HISTORY)
    running = [request([index, *DOCUMENT], 1) for index in range(50)]
    turns = [request([*history, index], 1) for index in range(50)]
    looks.clear()
    scheduler.add([*running, *turns])
    assert len(looks) == 100
    run(scheduler)
    assert len(looks) <= 200
    assert all(one.output == expected_output(one.prompt, 1) for one in (*running, *turns))
