"""The adaptive window against the best fixed one, over steps whose costs and acceptances are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dflash_trt.errors import UserError
from dflash_trt.runtime import pass_costs
from dflash_trt.runtime.pass_costs import PassCosts, measure
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.verifier import Step, Verified
from dflash_trt.runtime.window import AdaptiveWindow, FixedWindow, WindowPolicy
from tests.conftest import Engines
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import expected_output, request, run


def on_a_cpu(rows: int, width: int) -> float:
    """Bound by arithmetic, as SmolLM2 on two cores: eight tokens take twice the time of one."""
    return 30 + 8 * rows * width / 2 if width > 1 else 25 + 10 * rows


def on_a_gpu(rows: int, width: int) -> float:
    """Bound by memory until rows and tokens are many."""
    return (10 if width == 1 else 12) + max(0.0, 0.1 * (rows * width - 64))


@dataclass
class Machine:
    """Steps of requests that go on for ever, whose guesses are right with probability `likely(step, place)`."""

    seconds: Callable[[int, int], float]
    likely: Callable[[int, int], float]
    rows: Callable[[int], int]
    steps: int = 2000
    seed: int = 1
    widths: list[int] = field(default_factory=list)

    def tokens_per_second(self, policy: WindowPolicy) -> float:
        """Of all requests."""
        random_, tokens, seconds = random.Random(self.seed), 0, 0.0
        requests: list[Request] = []
        self.widths.clear()
        for step in range(self.steps):
            rows = self.rows(step)
            del requests[rows:]
            requests += [request([1], 10**6, limit=10**6) for _ in range(rows - len(requests))]
            windows = policy.choose(requests)
            self.widths.append(max(windows))
            accepted = []
            for window in windows:
                right = 0
                while right < window - 1 and random_.random() < self.likely(step, right):
                    right += 1
                accepted.append(right)
            policy.observe(requests, windows, accepted)
            tokens += rows + sum(accepted)
            seconds += self.seconds(rows, max(windows))
        return tokens / seconds


class Clocked(SimulatedExecutor):
    """Its steps take what `seconds` says, times what disturbs them."""

    def __init__(self, block_size: int, seconds: Callable[[int, int], float], noise: Callable[[], float]) -> None:
        super().__init__(64, block_size)
        self.now, self._seconds, self._noise = 0.0, seconds, noise

    def verify(self, step: Step) -> Verified:
        self.now += 1e-3 * self._seconds(len(step.slots), int(step.q_len.max())) * self._noise()
        return super().verify(step)


def measured(
    seconds: Callable[[int, int], float], block_size: int = 8, noise: Callable[[], float] = lambda: 1.0
) -> PassCosts:
    executor = Clocked(block_size, seconds, noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_costs.time, "perf_counter", lambda: executor.now)
        return measure(executor, lambda done, total: None)


BESIDE_FOUR_PROCESSES = [1.0, 1.1, 1.5]


def steady(likely: float) -> Callable[[int, int], float]:
    return lambda step, place: likely


CASES = {
    "good drafts": (steady(0.9), lambda step: 4),
    "poor drafts": (steady(0.2), lambda step: 4),
    "useless drafts": (steady(0.0), lambda step: 1),
    "useless drafts for several": (steady(0.0), lambda step: 4),
    "useless drafts for many": (steady(0.0), lambda step: 16),
    "later places are harder": (lambda step, place: 0.9**place * 0.8, lambda step: 2),
    "the batch grows": (steady(0.7), lambda step: 1 + step * 16 // 2000),
    "the batch changes all the time": (steady(0.7), lambda step: 1 + step * 7 % 16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seconds", [on_a_cpu, on_a_gpu])
@pytest.mark.parametrize("block_size", [8, 16])
def test_it_costs_at_most_three_percent(case: str, seconds: Callable[[int, int], float], block_size: int) -> None:
    """Beside the better of the whole block and no speculation; with a block of 8 beside any fixed window."""
    machine = Machine(seconds, *CASES[case])
    fixed = range(1, 9) if block_size == 8 else (1, block_size)
    best = max(machine.tokens_per_second(FixedWindow(window)) for window in fixed)
    assert machine.tokens_per_second(AdaptiveWindow(block_size, measured(seconds, block_size))) >= 0.97 * best


def test_it_beats_every_fixed_window_where_acceptance_changes() -> None:
    machine = Machine(on_a_cpu, lambda step, place: 0.95 if step // 500 % 2 else 0.05, lambda step: 2)
    best = max(machine.tokens_per_second(FixedWindow(window)) for window in range(1, 9))
    assert machine.tokens_per_second(AdaptiveWindow(8, measured(on_a_cpu))) > best
    assert sum(machine.widths[700:1000]) > 6 * 300 and sum(machine.widths[1200:1450]) < 3 * 250


def single_steps(random_: random.Random) -> Callable[[], float]:
    """Of five, one takes half as long again, and one ten times."""
    return lambda: random_.choice([1, 1, 1, 1.5, 10])


def in_stretches(random_: random.Random) -> Callable[[], float]:
    """The machine is slower for some fifty steps, then for some hundred not."""
    slower = False

    def noise() -> float:
        nonlocal slower
        slower ^= random_.random() < (0.02 if slower else 0.01)
        return 1.5 if slower else 1.0

    return noise


def beside_other_work(random_: random.Random) -> Callable[[], float]:
    """Decode steps of SmolLM2 on two cores beside four processes that keep them busy, over the fastest of them."""
    return lambda: random_.choice(BESIDE_FOUR_PROCESSES)


@pytest.mark.parametrize("disturbance", [single_steps, in_stretches, beside_other_work])
@pytest.mark.parametrize("likely", [0.5, 0.7, 0.9])
def test_what_disturbs_measuring_costs_little(
    disturbance: Callable[[random.Random], Callable[[], float]], likely: float
) -> None:
    shares = []
    for seed in range(5):
        costs = measured(on_a_cpu, noise=disturbance(random.Random(seed)))
        machine = Machine(on_a_cpu, steady(likely), lambda step: 4, seed=seed)
        best = max(machine.tokens_per_second(FixedWindow(window)) for window in range(1, 9))
        shares.append(machine.tokens_per_second(AdaptiveWindow(8, costs)) / best)
    assert sorted(shares)[1] >= 0.95


def test_what_a_large_batch_saved_for_looks_a_small_one_does_not_spend() -> None:
    machine = Machine(on_a_cpu, steady(0.0), lambda step: 64 if step < 3000 else 1, steps=3200)
    machine.tokens_per_second(AdaptiveWindow(8, measured(on_a_cpu)))
    assert machine.widths[3000:3200].count(8) <= 5


def test_looking_for_something_better_costs_a_hundredth() -> None:
    machine = Machine(on_a_cpu, steady(0.0), lambda step: 1, steps=20_000)
    plain = machine.tokens_per_second(FixedWindow(1))
    assert machine.tokens_per_second(AdaptiveWindow(8, measured(on_a_cpu))) >= 0.98 * plain
    assert max(machine.widths[10_000:]) == 8, "it never looked"


def test_requests_with_windows_of_their_own_pay_for_no_look() -> None:
    """A look costs those who are looked at no more than a hundredth of their own time."""
    policy = AdaptiveWindow(8, measured(on_a_cpu))
    free, fixed = request([1], 100, limit=10**6), request([1], 100, limit=10**6)
    fixed.verify_window = 1
    seconds = []
    for step in range(40_000):
        requests = [free if step % 101 == 0 else fixed]
        windows = policy.choose(requests)
        policy.observe(requests, windows, [0])
        if requests == [free]:
            seconds.append(on_a_cpu(1, max(windows)))
    assert sum(seconds[50:]) < 1.02 * len(seconds[50:]) * on_a_cpu(1, 1)


@pytest.mark.parametrize("own", [1, 3, 8])
def test_a_request_has_its_own_window(own: int) -> None:
    policy = AdaptiveWindow(8, measured(on_a_cpu))
    free, fixed = request([1], 100, limit=200), request([1], 100, limit=200)
    fixed.verify_window = own
    for _ in range(200):
        windows = policy.choose([free, fixed])
        assert windows[1] == own and 1 <= windows[0] <= 8
        policy.observe([free, fixed], windows, [0, 0])
    assert FixedWindow(5).choose([free, fixed]) == [5, own]


def test_no_more_is_verified_than_may_be_emitted() -> None:
    short = request([1], 2)
    for policy in (FixedWindow(8), AdaptiveWindow(8, measured(on_a_cpu))):
        for _ in range(20):
            windows = policy.choose([short, request([1], 60)])
            assert windows[0] <= 2
            policy.observe([short], windows[:1], [0])


def test_requests_are_served_whole_while_windows_change() -> None:
    scheduler = Scheduler(SimulatedExecutor(3), AdaptiveWindow(4, measured(on_a_cpu, 4)))
    requests = [request([10 + index], 25, seed=index) for index in range(20)]
    scheduler.add(requests)
    run(scheduler)
    assert [one.output for one in requests] == [expected_output([10 + i], 25, seed=i) for i in range(20)]


def test_drafts_are_as_good_after_a_pause(llms: Engines) -> None:
    """What passes of one token write for the drafter is what wider ones write."""
    llm = llms["tiny"]
    prompt = llm.encode_chat([{"role": "user", "content": "Write the diary of Bruno the teacher."}])

    class Pausing(FixedWindow):
        """Drafts nothing for the first twenty steps."""

        steps = 0

        def choose(self, requests: list[Request]) -> list[int]:  # type: ignore[override]
            self.steps += 1
            return FixedWindow(1 if self.steps <= 20 else 8).choose(requests)

    def one(policy: WindowPolicy, tokens: list[int], max_tokens: int) -> Request:
        scheduler = Scheduler(llm.executor, policy)
        found = llm.new_request(tokens, SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True), where="prompt")
        scheduler.add([found])
        run(scheduler)
        return found

    paused = one(Pausing(8), prompt, 60)
    resumed = one(FixedWindow(8), [*prompt, *paused.output[:20]], 40)
    assert paused.output[20:] == resumed.output
    assert paused.statistics.acceptance_histogram == resumed.statistics.acceptance_histogram
    assert paused.statistics.accepted_tokens > 10


def test_windows_of_an_engine(llms: Engines) -> None:
    llm = llms["llama"]
    assert isinstance(llm.windows(None), AdaptiveWindow) and isinstance(llm.windows(2), FixedWindow)
    with pytest.raises(UserError, match="verify_window is 9"):
        llm.windows(9)
