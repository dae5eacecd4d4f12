"""A histogram of what is shared among several, at the cost of one observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class ShareHistogram:
    """Each of the tokens that a pass makes took its share of the time.

    The library's histogram takes them one by one, which is a third of what a server does for a small model's pass.

    Args:
        name: of the metric.
        text: what it is.
        buckets: their upper bounds, rising; one without bound follows.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = [*buckets, float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, whole: float, among: int) -> None:
        """So many shared this; of none, nothing is counted."""
        if among:
            self._counts[bisect_left(self._bounds, whole / among)] += among
            self._sum += whole

    def collect(self, model_name: str) -> HistogramMetricFamily:
        """All so far, labelled."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        below = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([model_name], list(below), self._sum)
        return family
