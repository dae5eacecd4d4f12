"""How likely the target agrees with the next guess, given that it agreed with those before: a running estimate."""

from __future__ import annotations

from itertools import accumulate
from operator import mul


class Acceptance:
    """Of one request, or of all.

    A verification shows of a guess whether the target agrees with it only if it agreed with all before it, so each
    place in the block is estimated from the verifications that came that far.

    Args:
        likely: of each place, the probability to begin with.
        weight: observations that this counts as.
        memory: observations that an estimate rests on at most; it follows a text that becomes easier or harder.
    """

    def __init__(self, likely: list[float], *, weight: int, memory: int) -> None:
        self.likely = likely
        self._memory = memory
        self._seen = [weight] * len(likely)

    def observe(self, guesses: int, accepted: int) -> None:
        """A verification agreed with `accepted` of its `guesses`."""
        for place in range(min(accepted + 1, guesses)):
            self._seen[place] = seen = min(self._seen[place] + 1, self._memory)
            self.likely[place] += ((place < accepted) - self.likely[place]) / seen

    def expected_tokens(self) -> list[float]:
        """[b] tokens that a verification emits on average: of the target alone, with one guess, with two, ..."""
        return list(accumulate(accumulate([1.0, *self.likely], mul)))
