"""What decode steps take: concluded from those that were run, undisturbed by what else a machine does, remembered."""

from __future__ import annotations

import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.pass_costs import _SAMPLES, PassCosts, costs_file
from tests.conftest import Engines


def true_seconds(rows: int, width: int) -> float:
    return 1e-3 * (2 + 0.2 * rows if width == 1 else 3 + 0.4 * rows + 0.1 * rows * width)


def learned(cells: list[tuple[int, int]], repeats: int = 3) -> PassCosts:
    costs = PassCosts()
    for rows, width in cells * repeats:
        costs.observe(rows, width, true_seconds(rows, width))
    return costs


def test_nothing_is_known_before_a_step_of_its_kind() -> None:
    costs = learned([(1, 8)])
    assert costs.seconds(1, 1) is None and costs.seconds(1, 3) is None, "one width does not tell what a token takes"
    costs = learned([(1, 8), (1, 2)])
    assert costs.seconds(1, 1) is None
    assert [costs.seconds(1, width) for width in range(2, 9)] == pytest.approx(
        [true_seconds(1, width) for width in range(2, 9)]
    )
    assert costs.seconds(4, 3) is not None


def test_what_was_run_is_known() -> None:
    costs = learned([(1, 8), (4, 1)])
    assert costs.seconds(1, 8) == true_seconds(1, 8) and costs.seconds(4, 1) == true_seconds(4, 1)


@pytest.mark.parametrize("cell", [(2, 3), (8, 8), (16, 2), (16, 16), (5, 1)])
def test_the_rest_is_concluded(cell: tuple[int, int]) -> None:
    costs = learned([(1, 1), (4, 1), (1, 8), (4, 8), (4, 2)])
    assert costs.seconds(*cell) == pytest.approx(true_seconds(*cell))


def test_more_requests_are_hoped_to_take_no_longer() -> None:
    costs = learned([(4, 1), (4, 8), (4, 2)])
    assert costs.seconds(16, 1) == pytest.approx(true_seconds(4, 1))
    assert costs.seconds(16, 8) == pytest.approx(true_seconds(4, 8) + 4 * (true_seconds(4, 8) - true_seconds(4, 2)))


def test_disturbances_do_not_count() -> None:
    random_, costs = random.Random(0), PassCosts()
    for _ in range(200):
        for cell in ((1, 1), (1, 8)):
            slower = random_.choice([1, 1, 1, 2, 10])
            costs.observe(*cell, slower * true_seconds(*cell))
    for cell in ((1, 1), (1, 8)):
        assert costs.seconds(*cell) == pytest.approx(true_seconds(*cell))


def test_first_passes_of_a_shape_do_not_count() -> None:
    """An engine's first is slow, and the one after it captures a graph."""
    costs = PassCosts()
    for seconds in (9.0, 5.0, 0.5):
        assert costs.seconds(1, 8) is None and costs.seconds(2, 4) is None
        costs.observe(1, 8, seconds)
    assert costs.seconds(1, 8) == 0.5


def test_a_clock_that_did_not_advance_is_not_believed() -> None:
    costs = PassCosts()
    costs.observe(1, 1, 0.0)
    assert costs.seconds(1, 1) is None


@given(st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=30), st.integers(0, 600))
def test_the_fastest_quarter_of_the_latest_counts(latest: list[float], before: int) -> None:
    costs = PassCosts()
    for seconds in [1e-6] * before + latest * 20:
        costs.observe(1, 8, seconds)
    kept = ([1e-6] * before + latest * 20)[-_SAMPLES:]
    assert costs.seconds(1, 8) == pytest.approx(fmean(sorted(kept)[: -(-len(kept) // 4)]))


def test_memory_does_not_grow() -> None:
    costs = learned([(1, 8)], repeats=10_000)
    assert sum(map(len, costs._samples.values())) == _SAMPLES


def test_they_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "costs.json"
    costs = PassCosts(file)
    for _ in range(2):
        costs.observe(1, 1, 9.0)
    for _ in range(3):
        costs.observe(2, 5, 0.25)
    costs.save()
    assert json.loads(file.read_text()) == [[2, 5, 0.25]], "what was run twice is not known"
    assert PassCosts(file).seconds(2, 5) == 0.25
    assert [each.name for each in file.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "content", ["", "{}", "[[1, 2]]", "[[1, 1, -3]]", "[[0, 1, 1]]", "[[1, 1, NaN]]", "\x00", '[["a", 1, 1]]']
)
def test_a_damaged_file_is_replaced_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        costs = PassCosts(file)
    assert str(file) in caplog.text and costs.seconds(1, 1) is None
    for _ in range(3):
        costs.observe(1, 1, 0.5)
    costs.save()
    assert json.loads(file.read_text()) == [[1, 1, 0.5]]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    costs = PassCosts(tmp_path / "file" / "costs.json")
    for _ in range(3):
        costs.observe(1, 1, 0.5)
    costs.save()


def test_many_writers_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"

    def write(seed: int) -> None:
        costs = PassCosts()
        costs._file = file
        for rows in [*range(1, 200)] * 3:
            costs.observe(rows, 1, 1.0 + seed)
        costs.save()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(40)))
    assert len({seconds for _, _, seconds in json.loads(file.read_text())}) == 1


def test_an_engine_remembers_when_it_is_closed(llms: Engines) -> None:
    path = llms["llama"].engine.path
    with LLM(path, device="cpu") as llm:
        llm.generate([[5, 6]])
        file = costs_file(llm.engine, "dflash")
        file.unlink(missing_ok=True)
    assert PassCosts(file).seconds(1, llm.executor.max_window) is not None
