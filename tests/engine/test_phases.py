"""How far a build is, from nested phases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.engine.phases import Phases


def test_a_step_counts_as_its_part() -> None:
    told: list[tuple[str, float]] = []
    phases = Phases(lambda phase, done: told.append((phase, done)))
    phases.start("whole", None, 4)
    phases.start("first", "whole", 2)
    phases.start("inner", "first", 5)
    phases.step("inner", 2)
    phases.finish("inner")
    phases.finish("first")
    phases.step("whole", 0)
    phases.step("whole", 1)
    phases.finish("whole")
    assert told == [
        ("whole", 0.0),
        ("first", 0.0),
        ("first", 3 / 5 / 2 / 4),
        ("first", 1 / 2 / 4),
        ("first", 1 / 4),
        ("whole", 1 / 4),
        ("whole", 2 / 4),
        ("whole", 1.0),
    ]


NAMES = st.sampled_from("abcd")
CALLS = st.one_of(
    st.tuples(st.just("start"), NAMES, st.one_of(st.none(), NAMES), st.integers(0, 5)),
    st.tuples(st.just("step"), NAMES, st.integers(0, 9)),
    st.tuples(st.just("finish"), NAMES),
)


@given(st.lists(CALLS, max_size=40))
def test_whatever_is_reported_progress_never_shrinks(calls: list[tuple[object, ...]]) -> None:
    """Phases in any order, of names that come again, inside themselves or never begun."""
    told: list[float] = []
    phases = Phases(lambda phase, done: told.append(done))
    for name, *arguments in calls:
        getattr(phases, str(name))(*arguments)
    assert told == sorted(told) and all(0 <= done <= 1 for done in told)
