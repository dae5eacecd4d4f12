"""A histogram of shares says what the library's says of each share by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from dflash_trt.serving.share_histogram import ShareHistogram

BUCKETS = (0.25, 0.5, 1.0, 4.0)
SHARES = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.3, 1.0, 3.5, 4.0, 9.0]), st.integers(0, 8)))


@given(SHARES)
def test_it_is_the_librarys(shares: list[tuple[float, int]]) -> None:
    ours = ShareHistogram("seconds", "Of a share.", BUCKETS)
    registry = CollectorRegistry()
    theirs = Histogram("seconds", "Of a share.", ["model_name"], buckets=BUCKETS, registry=registry).labels("m")
    for share, among in shares:
        ours.observe(share * among, among)
        for _ in range(among):
            theirs.observe(share)
    expected = {
        (each.name, *sorted(each.labels.items())): each.value
        for each in next(iter(registry.collect())).samples
        if not each.name.endswith("_created")
    }
    found = {(each.name, *sorted(each.labels.items())): each.value for each in ours.collect("m").samples}
    assert found == pytest.approx(expected)
