"""Passes that come again: run, then captured, then replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Tensors = Mapping[str, Tensor]
Key = tuple[tuple[str, int, tuple[int, ...]], ...]


class Replays:
    """Runs each pass once as it is; from its second time on it is captured, and later ones are replayed.

    Passes are the same where every tensor has the same address and shape.

    Args:
        run: runs a pass.
        capture: called right after `run` has run the same pass; returns what replays it.
        most: captured passes that are kept, and others that are remembered; those not used for longest go first.
    """

    def __init__(
        self, run: Callable[[Tensors], None], capture: Callable[[Tensors], Callable[[], None]], most: int
    ) -> None:
        self._run = run
        self._capture = capture
        self._most = most
        self._captured: OrderedDict[Key, Callable[[], None]] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def __call__(self, tensors: Tensors) -> None:
        """A pass over these tensors."""
        key = tuple((name, tensor.data_ptr(), tuple(tensor.shape)) for name, tensor in tensors.items())
        if key in self._captured:
            self._captured.move_to_end(key)
            self._captured[key]()
            return
        self._run(tensors)
        if key in self._seen:
            del self._seen[key]
            self._keep(self._captured, key, self._capture(tensors))
        else:
            self._keep(self._seen, key, None)

    def _keep(self, kept: OrderedDict[Key, Any], key: Key, value: Any) -> None:
        kept[key] = value
        if len(kept) > self._most:
            kept.popitem(last=False)
