"""What decode steps take: measured on a grid, known between its cells, remembered."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.pass_costs import PassCosts, costs_file, grid, measure, remember, remembered
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import Engines
from tests.runtime.simulated_executor import SimulatedExecutor


def true_seconds(rows: int, width: int) -> float:
    return 1e-3 * (2 + 0.2 * rows if width == 1 else 3 + 0.4 * rows + 0.1 * rows * width)


def table(rows: list[int], widths: list[int]) -> PassCosts:
    return PassCosts({(row, width): true_seconds(row, width) for row in rows for width in widths})


@pytest.mark.parametrize(
    ("batch", "window", "rows", "widths"),
    [
        (1, 1, [1], [1]),
        (1, 8, [1], [1, 2, 4, 8]),
        (4, 8, [1, 4], [1, 2, 4, 8]),
        (64, 16, [1, 4, 16, 64], [1, 2, 4, 8, 16]),
        (48, 7, [1, 4, 16, 48], [1, 2, 4, 7]),
    ],
)
def test_the_grid(batch: int, window: int, rows: list[int], widths: list[int]) -> None:
    assert grid(SimulatedExecutor(batch, window)) == [(row, width) for row in rows for width in widths]


def test_every_cell_is_run_in_turn_and_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = SimulatedExecutor(4)
    disturbance = iter([7.0, 1.0, 2.0, 1.0, 1.0] * 100)

    def clock() -> float:
        """Before a step, whatever; after it, that and what it took."""
        steps = len(executor.passes)
        if steps > clock.steps:  # type: ignore[attr-defined]
            last = executor.passes[-1]
            clock.now += true_seconds(len(last.slots), last.q_len[0]) * next(disturbance)  # type: ignore[attr-defined]
            clock.steps = steps  # type: ignore[attr-defined]
        return clock.now  # type: ignore[attr-defined,no-any-return]

    clock.now, clock.steps = 0.0, 0  # type: ignore[attr-defined]
    monkeypatch.setattr("dflash_trt.runtime.pass_costs.time.perf_counter", clock)
    told: list[tuple[int, int]] = []
    costs = measure(executor, lambda done, total: told.append((done, total)))
    cells = grid(executor)
    assert [(len(each.slots), each.q_len[0]) for each in executor.passes] == cells * 5
    assert told == [(index + 1, 5 * len(cells)) for index in range(5 * len(cells))]
    assert costs.measured == pytest.approx({cell: true_seconds(*cell) for cell in cells})


def test_slow_machines_run_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr("dflash_trt.runtime.pass_costs.time.perf_counter", lambda: float(next(now)))
    executor = SimulatedExecutor(4)
    assert set(measure(executor, lambda done, total: None).measured) == set(grid(executor))
    assert len(executor.passes) == len(grid(executor))


@given(st.integers(1, 64), st.integers(1, 16))
def test_between_cells_lines_are_straight(rows: int, width: int) -> None:
    assert table([1, 4, 16, 64], [1, 2, 4, 8, 16]).seconds(rows, width) == pytest.approx(true_seconds(rows, width))


def test_they_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "costs.json"
    costs = table([1, 4], [1, 2, 8])
    assert remembered(file) is None
    remember(costs, file)
    found = remembered(file)
    assert found is not None and found.measured == costs.measured
    assert [each.name for each in file.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", "[[1, 2]]", "[[1, 1, -3]]", "[[0, 1, 1]]", "[[1, 1, NaN]]", "\x00", '[["a", 1, 1]]']
    + ["[[1, 2, 1.0]]", "[[1, 1, 1.0], [4, 2, 1.0]]"],
)
def test_a_damaged_file_is_replaced_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "costs.json"
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert remembered(file) is None
    assert str(file) in caplog.text
    remember(table([1], [1]), file)
    assert len(json.loads(file.read_text())) == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    remember(table([1], [1]), tmp_path / "file" / "costs.json")


def test_many_writers_leave_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"

    def write(seed: int) -> None:
        remember(PassCosts({(rows, 1): 1.0 + seed for rows in range(1, 200)}), file)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(40)))
    assert len({seconds for _, _, seconds in json.loads(file.read_text())}) == 1


def test_an_engine_is_measured_once(llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = llms["llama"].engine.path
    with LLM(path, device="cpu") as llm:
        expected = llm.generate([[5, 6]]).outputs[0].outputs[0].token_ids
        file = costs_file(llm.engine, "dflash")
        kept = file.read_bytes()
        assert llm.generate([[5, 6]]).outputs[0].outputs[0].token_ids == expected
    with LLM(path, device="cpu") as again:
        told: list[int] = []
        again.pass_costs(lambda done, total: told.append(done))
        assert told == [] and file.read_bytes() == kept


def test_a_stream_that_was_left_in_the_middle_does_not_go_on_in_slots_that_were_measured_in(
    llms: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with LLM(llms["llama"].engine.path, device="cpu") as llm:
        stream = llm.stream([[5, 6]], SamplingParams(max_tokens=50, ignore_eos=True), verify_window=1)
        next(iter(stream))
        llm.pass_costs()
        with pytest.raises(RuntimeError, match="finish a stream"):
            list(stream)
