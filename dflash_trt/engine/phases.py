"""How far TensorRT is with an engine, from the phases that it reports, one inside the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any

OnProgress = Callable[[str, float], None]
"""Told the phase under the outermost one, and how much of the whole is done, 0 to 1; each percent once."""


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0
    inner: float = 0.0
    """How much of the step under way is done."""

    @property
    def part(self) -> float:
        """How much of it is done."""
        return min(1.0, (self.done + self.inner) / self.steps)


class Phases:
    """The phases under way, by name; may be told of them by several threads.

    A step counts as its part of its phase, whatever time it takes, and what is done never becomes less.
    """

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._phases: dict[str, _Phase] = {}
        self._lock = Lock()
        self._whole = 0.0
        self._told: tuple[str, int] | None = None

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins, inside another one or the outermost."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(1, steps))
            self._tell(name)

    def step(self, name: str, index: int) -> None:
        """Step `index` of a phase is done."""
        with self._lock:
            if name in self._phases:
                phase = self._phases[name]
                phase.done, phase.inner = max(phase.done, index + 1), 0.0
                self._tell(name)

    def finish(self, name: str) -> None:
        """A phase is done."""
        with self._lock:
            if name in self._phases:
                phase = self._phases[name]
                phase.done, phase.inner = phase.steps, 0.0
                self._tell(name)
                del self._phases[name]

    def _tell(self, name: str) -> None:
        outer = self._outer(name)
        for inner, around in pairwise(outer):
            phase = self._phases[around]
            phase.inner = max(phase.inner, self._phases[inner].part)
        self._whole = max(self._whole, self._phases[outer[-1]].part)
        shown = outer[max(0, len(outer) - 2)]
        if self._told != (shown, int(100 * self._whole)):
            self._told = shown, int(100 * self._whole)
            self._on_progress(shown, self._whole)

    def _outer(self, name: str) -> list[str]:
        """The phase, the one that it is inside, and so on to the outermost."""
        names = [name]
        while (parent := self._phases[names[-1]].parent) in self._phases and parent not in names:
            names.append(str(parent))
        return names


def phase_monitor(trt: Any, phases: Phases) -> Any:
    """An `IProgressMonitor` that tells `phases`; to be held until the build is over."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            phases.start(name, parent, steps)

        def step_complete(self, name: str, index: int) -> bool:
            phases.step(name, index)
            return True

        def phase_finish(self, name: str) -> None:
            phases.finish(name)

    return Monitor()
