"""The scheduler on a thread of its own, and coroutines that wait for what it makes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread

from dflash_trt.runtime.request import Request, Statistics
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.serving.answer import Answer, Progress, ShuttingDown
from dflash_trt.serving.snapshot import Snapshot

_PATIENCE = 5.0
"""Seconds that a thread whose engine has failed gets to end: it may hang in an exchange with a rank that is gone."""
_TOGETHER = 0.02
"""Seconds in which steps may be told of together. Each costs the event loop time, and so the thread: one interpreter
has both."""


class QueueFull(Exception):
    """As many requests are open as may be."""


class EngineThread:
    """Steps a scheduler while it has requests, and sleeps while it has none.

    Its methods are for the coroutines of one event loop. What the thread does for them it does between two steps. What
    a step made reaches them in one call: at once, or with that of steps just after it, where the last call was just
    before.

    Args:
        scheduler: which nothing else uses from `start` on.
        most_requests: that may be open.
        may_step: called before each step; may raise.
        on_arrival: called with requests that are taken.
        on_progress: called in the event loop of each step, before any coroutine sees what it made.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        most_requests: int,
        may_step: Callable[[], None],
        on_arrival: Callable[[Sequence[Request]], None],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.most_requests = most_requests
        self.draining = False
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self._scheduler = scheduler
        self._may_step = may_step
        self._on_arrival = on_arrival
        self._on_progress = on_progress
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._stopping = False
        self._cut = False
        """What is made from now on, nobody waits for."""
        self._made: deque[Progress] = deque()
        """What is yet to be delivered."""
        self._will_collect = False
        """The event loop is about to deliver it, without being told again."""
        self._collection: asyncio.TimerHandle | None = None
        self._preparing = 0
        """Requests that room is kept for."""
        self._open: set[Answer] = set()
        self._answers: dict[Request, Answer] = {}
        """Of requests that have not ended."""
        self._snapshots: set[asyncio.Future[Snapshot]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._ended_statistics = Statistics()
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; to be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, whatever it has to do."""
        self.draining = True
        self._commands.put(self._stop)
        patience = None if self.failure is None else _PATIENCE
        await asyncio.to_thread(self._thread.join, patience)
        self._give_up()

    @property
    def open_requests(self) -> int:
        """Requests that are being prepared or made, or whose answers somebody still reads."""
        answers = self._open.union(self._answers.values())
        return self._preparing + sum(len(answer.requests) for answer in answers)

    @contextmanager
    def room(self, count: int) -> Iterator[None]:
        """Keep room for so many requests during the block, which prepares and submits them.

        Raises:
            QueueFull: too many are open.
            ShuttingDown: none is taken any more.
        """
        if self.draining or self.failure is not None:
            raise ShuttingDown("the server is shutting down")
        if self.open_requests + count > self.most_requests:
            raise QueueFull(f"{self.open_requests} requests are open, {self.most_requests} may be")
        self._preparing += count
        self._none_open.clear()
        try:
            yield
        finally:
            self._preparing -= count
            self._notice_none_open()

    def submit(self, requests: Sequence[Request]) -> Answer:
        """Queue requests that there is `room` for; `leave` their answer in the end.

        Raises:
            ShuttingDown: the engine has ended, or is about to.
        """
        if self._cut or self.failure is not None or not self._thread.is_alive():
            raise ShuttingDown("the engine has ended")
        answer = Answer(requests)
        self._answers.update(dict.fromkeys(requests, answer))
        self._open.add(answer)
        self._on_arrival(requests)
        self._commands.put(lambda: self._scheduler.add(requests))
        return answer

    def cancel(self, answer: Answer) -> None:
        """End its requests as they are, at the next step."""
        unfinished = [request for request in answer.requests if request in self._answers]
        if unfinished:
            self._commands.put(lambda: self._cancel(unfinished))

    def leave(self, answer: Answer) -> None:
        """Nobody reads it any more; what is unfinished is cancelled."""
        self.cancel(answer)
        self._open.discard(answer)
        self._notice_none_open()

    def _notice_none_open(self) -> None:
        if not self._open and not self._preparing:
            self._none_open.set()

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """`leave` an answer at the end of the block."""
        try:
            yield
        finally:
            self.leave(answer)

    def fail(self, error: Exception) -> None:
        """End with an error, whatever there is to do; for any thread, and though the engine's own hang in a pass."""
        self._commands.put(partial(_raise, error))
        self._tell(self._fail, error)

    async def drain(self, timeout: float) -> None:
        """Take no more calls, wait until all answers are read, and cancel those that are not after `timeout` s."""
        self.draining = True
        try:
            await asyncio.wait_for(self._none_open.wait(), timeout)
        except asyncio.TimeoutError:
            self._cut = True
            for answer in self._open:
                self.cancel(answer)

    async def snapshot(self) -> Snapshot:
        """The scheduler as it is after the step under way.

        Raises:
            ShuttingDown: the engine has ended.
        """
        if self.failure is not None or not self._thread.is_alive():
            raise ShuttingDown("the engine has ended")
        future: asyncio.Future[Snapshot] = self._loop.create_future()
        self._snapshots.add(future)
        future.add_done_callback(self._snapshots.discard)
        self._commands.put(lambda: self._tell(_resolve, future, self._look()))
        return await future

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._may_step()
                emissions = self._scheduler.step()
                for request in self._scheduler.ended:
                    self._ended_statistics.add(request.statistics)
                if emissions or self._scheduler.ended:
                    self._made.append(
                        Progress(emissions, self._scheduler.ended, self._scheduler.window, time.monotonic())
                    )
                    if self._scheduler.ended or not self._will_collect:
                        self._will_collect = True
                        self._tell(self._collect)
        except BaseException as error:
            self._tell(self._fail, error)

    def _tell(self, what: Callable[..., object], *arguments: object) -> None:
        """Call something in the event loop, which may have ended before a pass that hung."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(what, *arguments)

    def _obey(self) -> bool:
        """Follow commands, waiting for them while there is nothing to step; False when it is time to stop."""
        while not self._stopping and (self._scheduler.idle or not self._commands.empty()):
            self._commands.get()()
        return not self._stopping

    def _cancel(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._scheduler.cancel(request)

    def _stop(self) -> None:
        self._stopping = True

    def _look(self) -> Snapshot:
        return Snapshot.of(self._scheduler, self._ended_statistics)

    # What follows runs in the event loop, for the thread.

    def _collect(self) -> None:
        """Deliver what was made since the last time, and look again in a while."""
        if self._collection is not None:
            self._collection.cancel()
        # In this order: what the thread makes after the look, it tells of.
        self._will_collect = False
        if not self._made or self.failure is not None:
            return
        self._will_collect = True
        try:
            while self._made:
                self._deliver(self._made.popleft())
        except Exception as error:
            self._fail(error)
        self._collection = self._loop.call_later(_TOGETHER, self._collect)

    def _deliver(self, progress: Progress) -> None:
        self._on_progress(progress)
        for emission in progress.emissions:
            self._answers[emission.request].emit(emission)
        for request in progress.ended:
            self._answers.pop(request).end(request)

    def _fail(self, error: BaseException) -> None:
        self._collect()  # what was made before is still read
        self.failure = self.failure or error
        self.failed.set()
        self._answers.clear()
        self._give_up()

    def _give_up(self) -> None:
        for answer in self._open:
            answer.give_up()
        for future in self._snapshots:
            if not future.done():
                future.set_exception(ShuttingDown("the engine has ended"))


def _raise(error: Exception) -> None:
    raise error


def _resolve(future: asyncio.Future[Snapshot], snapshot: Snapshot) -> None:
    if not future.done():
        future.set_result(snapshot)
