"""The scheduler under arrivals, cancellations, deadlines and steps in any order, against a model of what it owes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflash_trt.runtime.request import FinishReason, Request
from dflash_trt.runtime.scheduler import Emission, Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.runtime.simulated_executor import SimulatedExecutor
from tests.runtime.test_scheduler import expected_output, request

MAX_TOKENS = 30


@dataclass(eq=False)
class Expected:
    """What is known of a request without asking the scheduler."""

    request: Request
    arrival: int
    alone: list[int]
    emitted: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    is_reported: bool = False


class SchedulerMachine(RuleBasedStateMachine):
    """Every step is checked whole: who ran, in which slots, what came out and who ended."""

    @initialize(
        max_batch_size=st.integers(1, 4),
        unused=st.integers(0, 1),
        window=st.integers(1, 4),
        chunk=st.integers(1, 6) | st.integers(8, 40),
        reuse=st.booleans(),
    )
    def start(self, max_batch_size: int, unused: int, window: int, chunk: int, reuse: bool) -> None:
        self.now = 0.0
        self.max_batch_size = max_batch_size
        self.executor = SimulatedExecutor(max_batch_size + unused, max_num_tokens=chunk)
        self.scheduler = Scheduler(
            self.executor,
            FixedWindow(window),
            max_batch_size=max_batch_size,
            reuse_prefixes=reuse,
            clock=lambda: self.now,
        )
        self.reuses = reuse
        self.all: list[Expected] = []
        self.steps = 0
        self.overtook = False

    @rule(
        start=st.integers(10, 13),
        length=st.integers(1, 25),
        max_tokens=st.integers(1, MAX_TOKENS),
        priority=st.integers(-1, 1),
        patience=st.none() | st.integers(0, 30),
    )
    def arrive(self, start: int, length: int, max_tokens: int, priority: int, patience: int | None) -> None:
        self._add([start + 7 * i for i in range(length)], max_tokens, priority, patience)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), more=st.integers(0, 6), max_tokens=st.integers(1, MAX_TOKENS))
    def go_on(self, data: st.DataObject, more: int, max_tokens: int) -> None:
        """A next turn: what a request has so far, cut anywhere, and more."""
        tokens = data.draw(st.sampled_from(self.all)).request.tokens
        cut = data.draw(st.integers(1, min(len(tokens), 50)))
        self._add([*tokens[:cut], *range(20, 20 + more)], max_tokens, 0, None)

    def _add(self, prompt: list[int], max_tokens: int, priority: int, patience: int | None) -> None:
        deadline = None if patience is None else self.now + patience
        arrival = len(self.all)
        one = request(prompt, max_tokens, seed=arrival, priority=priority, deadline=deadline)
        self.all.append(Expected(one, arrival, expected_output(prompt, max_tokens, seed=arrival)))
        self.scheduler.add([one])

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        if one.finish_reason is None:
            one.finish_reason = "cancelled"
        self.scheduler.cancel(one.request)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def step(self) -> None:
        self.steps += 1
        for one in self.all:
            deadline = one.request.deadline
            if one.finish_reason is None and deadline is not None and self.now >= deadline:
                one.finish_reason = "deadline"
        in_slots = {id(each) for each in self.scheduler.running}
        running = [one for one in self.all if id(one.request) in in_slots and one.finish_reason is None]
        queue = [one for one in self.all if one.finish_reason is None and id(one.request) not in in_slots]
        queue.sort(key=lambda one: (one.request.priority, one.arrival))
        turns = self._turns(queue)
        prompt = self.scheduler.prefilling
        under_way = [one for one in self.all if prompt and one.request is prompt.request and one.finish_reason is None]
        self.executor.passes.clear()
        emissions = self.scheduler.step()
        turn = self._turn(turns, emissions)
        self.overtook = under_way != [] and turn is not under_way[0]
        self._take(emissions)
        followers = [one for one in queue if one is not turn]
        self._check_passes(running, turn, followers, emissions)
        self._check_ended()

    def _turns(self, open_ones: list[Expected]) -> list[Expected]:
        """Whose prompt may run first: of several, the last unless the caches have enough of one before it."""
        under_way = self.scheduler.prefilling
        decoding = sum(one.finish_reason is None for one in self.all) - len(open_ones)
        for one in open_ones:
            if under_way is not None and one.request is under_way.request:
                chunk = self.executor.max_num_tokens
                may_be_overtaken = not self.overtook and one.request.prompt_length - under_way.kv_len > chunk
                if not may_be_overtaken or decoding + 2 > self.max_batch_size:
                    return [one]
                others = [
                    other for other in open_ones if other is not one and other.request.priority <= one.request.priority
                ]
                short = [index for index, other in enumerate(others) if other.request.prompt_length <= chunk]
                before = others[: short[0] + 1] if short else [*others, one]
                return before if self.reuses else before[-1:]
        if decoding == self.max_batch_size:
            return []
        return open_ones[:1]

    def _turn(self, turns: list[Expected], emissions: list[Emission]) -> Expected | None:
        """Whose prompt has run first: one that began to emit has, and one that overtakes is through at once."""
        for emission in emissions:
            for one in turns:
                if one.request is emission.request:
                    return one
        return turns[-1] if turns else None

    def _take(self, emissions: list[Emission]) -> None:
        for emission in emissions:
            one = next(one for one in self.all if one.request is emission.request)
            assert one.finish_reason is None, "emits after its end"
            one.emitted.append(emission.token)
            if len(one.emitted) == len(one.alone):
                one.finish_reason = one.request.finish_reason
                assert one.finish_reason in ("stop", "length")

    def _check_passes(
        self, running: list[Expected], turn: Expected | None, followers: list[Expected], emissions: list[Emission]
    ) -> None:
        """Prompts of a chunk together, as many as fit, then one pass of everything that decodes, and nothing else."""
        passes, under_way = self.executor.passes, self.scheduler.prefilling
        emitted = [emission.request for emission in emissions]
        decoding, room = len(running), self.executor.max_num_tokens
        while turn is not None:
            chunk = passes.pop(0)
            assert len(chunk.slots) == 1 and decoding <= chunk.slots[0] < self.max_batch_size
            assert chunk.q_len[0] <= room
            room -= max(chunk.q_len[0], -(-self.executor.max_num_tokens // 8))
            is_through = turn.request in emitted
            assert is_through or (under_way is not None and under_way.request is turn.request)
            decoding += is_through and (emitted.count(turn.request) > 1 or turn.finish_reason is None)
            turn = None
            if under_way is None and followers and decoding < self.max_batch_size:
                follower = followers.pop(0)
                turn = follower if follower.request in emitted else None
                assert turn is not None or follower.request.prompt_length > room, "it would have fitted"
        assert [each.slots for each in passes] == ([list(range(decoding))] if decoding else [])
        assert all(one.request in emitted for one in running), "a running request did not advance"

    def _check_ended(self) -> None:
        ended = {one for one in self.all if one.finish_reason is not None and not one.is_reported}
        assert len(self.scheduler.ended) == len(ended)
        assert {id(one) for one in self.scheduler.ended} == {id(one.request) for one in ended}
        for one in ended:
            one.is_reported = True

    @invariant()
    def outputs_are_those_of_the_request_alone(self) -> None:
        for one in getattr(self, "all", []):
            assert one.request.output == one.emitted == one.alone[: len(one.emitted)]
            assert one.request.finish_reason == one.finish_reason or one.finish_reason is None

    @invariant()
    def caches_hold_what_is_kept(self) -> None:
        if not hasattr(self, "all"):
            return
        under_way = self.scheduler.prefilling
        for slot, tokens in self.scheduler.kept.tokens.items():
            assert len(self.scheduler.running) <= slot < self.max_batch_size
            assert under_way is None or slot != under_way.slot
            for caches in (self.executor.target, self.executor.drafter):
                assert caches[slot][: len(tokens)] == tokens
        assert 0 <= self.scheduler.prefix_hits <= self.scheduler.prefix_queries

    def teardown(self) -> None:
        """Everything ends, in no more steps than its chunks and tokens."""
        if not hasattr(self, "all"):
            return
        left = sum(len(one.request.prompt) + len(one.alone) + 1 for one in self.all if not one.is_reported)
        for _ in range(left):
            if not self.scheduler.idle:
                self.step()
        assert self.scheduler.idle
        assert not self.scheduler.running and self.scheduler.prefilling is None and len(self.scheduler.waiting) == 0
        assert all(one.is_reported for one in self.all)
        assert all(one.emitted == one.alone for one in self.all if one.finish_reason in ("stop", "length"))


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestScheduler = SchedulerMachine.TestCase
