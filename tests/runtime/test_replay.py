"""When a pass is run, captured and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dflash_trt.runtime.replay import Replays

MEMORY = torch.zeros(8)


class Recorder:
    """What a GPU would be asked to do, by the size of the pass."""

    def __init__(self, most: int = 8) -> None:
        self.done: list[tuple[str, int]] = []
        self.passes = Replays(lambda tensors: self._note("run", tensors), self._captured, most)

    def __call__(self, size: int, start: int = 0) -> list[tuple[str, int]]:
        self.done.clear()
        self.passes({"x": MEMORY[start : start + size]})
        return list(self.done)

    def _note(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        self.done.append((what, len(tensors["x"])))

    def _captured(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        self._note("capture", tensors)
        return lambda: self._note("replay", tensors)


def test_a_pass_is_captured_when_it_comes_again_and_right_after_it_ran() -> None:
    """With passes of another shape between."""
    recorder = Recorder()
    assert recorder(3) == [("run", 3)]
    assert recorder(2) == [("run", 2)]
    assert recorder(3) == [("run", 3), ("capture", 3)]
    assert recorder(2) == [("run", 2), ("capture", 2)]
    assert recorder(3) == [("replay", 3)]
    assert recorder(2) == [("replay", 2)]


def test_another_address_is_another_pass() -> None:
    recorder = Recorder()
    recorder(2), recorder(2)
    assert recorder(2, start=1) == [("run", 2)]
    assert recorder(2) == [("replay", 2)]


def test_captures_that_are_not_used_are_forgotten_and_passes_that_came_once_push_out_none() -> None:
    recorder = Recorder(most=2)
    for size in (1, 1, 2, 2):
        recorder(size)
    for size in (3, 4, 5):
        assert recorder(size) == [("run", size)]
    assert recorder(1) == [("replay", 1)]
    assert recorder(5) == [("run", 5), ("capture", 5)]  # in the place of 2
    assert recorder(1) == [("replay", 1)]
    assert recorder(2) == [("run", 2)]
