"""Passes that come again: run, then captured, then replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor

Tensors = Mapping[str, Tensor]
Key = tuple[tuple[str, int, tuple[int, ...]], ...]


class Replays:
    """Runs each pass once as it is; from its second time on it is captured, and later ones are replayed.

    Passes are the same where every tensor has the same address and shape.

    Args:
        run: runs a pass.
        capture: called right after `run` has run the same pass, since what a pass needs is set up when it first runs;
            returns what replays it.
        most: captured passes that are kept; the one that was not used for longest goes first.
    """

    def __init__(
        self, run: Callable[[Tensors], None], capture: Callable[[Tensors], Callable[[], None]], most: int
    ) -> None:
        self._run = run
        self._capture = capture
        self._most = most
        self._seen: OrderedDict[Key, Callable[[], None] | None] = OrderedDict()

    def __call__(self, tensors: Tensors) -> None:
        """A pass over these tensors."""
        key = tuple((name, tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in tensors.items())
        is_new, replay = key not in self._seen, self._seen.get(key)
        if replay is not None:
            replay()
        else:
            self._run(tensors)
            self._seen[key] = None if is_new else self._capture(tensors)
        self._seen.move_to_end(key)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
