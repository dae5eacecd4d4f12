"""Ranks as processes: who starts them, how they end, and what is refused before they start."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.errors import UserError
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.rank_group import World, launched_world, share_of_cores
from dflash_trt.runtime.rank_processes import RanksEnded
from tests.conftest import TINY, Engines
from tests.runtime.rank_program import PARAMS

ROOT = Path(__file__).parents[2]
PROMPT = [5, 6, 7]
SECONDS = 20
"""In which processes on a busy machine must be gone."""


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The tiny pair by its ranks."""
    built = {}
    for ranks in (2, 4):
        config = BuildConfig(dtype="float64", max_batch_size=2, max_seq_len=128, tp_size=ranks)
        target, drafter = open_target(TINY / "target"), open_drafter(TINY / "drafter")
        built[ranks] = build_engine(target, drafter, config, tmp_path_factory.mktemp("ranks") / "engine").path
    return built


@pytest.fixture(scope="session")
def expected(llms: Engines) -> list[int]:
    return greedy(llms["tiny"])


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    before = set(children())
    yield
    assert_gone([child for child in children() if child not in before])


def children() -> list[psutil.Process]:
    return sorted(psutil.Process().children(), key=lambda child: child.pid)  # ranks in their order


def greedy(llm: LLM) -> list[int]:
    tokens: list[int] = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    return tokens


def start(engine: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The program over an engine, with what a launcher would set."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.rank_program", str(engine), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_gone(processes: Iterable[psutil.Process]) -> None:
    """Not by waiting for them: that would take their exit status from whoever started them."""
    end = time.monotonic() + SECONDS
    while left := [process for process in processes if runs(process)]:
        assert time.monotonic() < end, f"{left} outlive what started them"
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_of(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_ranks_end_with_a_with(engines: dict[int, Path], expected: list[int]) -> None:
    before = children()
    with LLM(engines[2], device="cpu") as llm:
        assert greedy(llm) == expected
        ranks = [child for child in children() if child not in before]
        assert len(ranks) == 1
        [rank] = ranks
        assert not any("transformers" in mapped.path for mapped in rank.memory_maps())
        assert rank.environ()["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", str(share_of_cores(2)))
    assert not rank.is_running()
    with pytest.raises(RanksEnded, match="the ranks of this engine have ended; load it again"):
        greedy(llm)
    llm.close()


def test_ranks_end_with_their_llm(engines: dict[int, Path]) -> None:
    before = children()
    llm = LLM(engines[2], device="cpu")
    ranks = [child for child in children() if child not in before]
    del llm
    gc.collect()
    assert not any(rank.is_running() for rank in ranks)


def test_a_rank_that_dies_ends_the_others(engines: dict[int, Path]) -> None:
    """Also while nothing is asked of them, and the next call says which it was."""
    before = children()
    llm = LLM(engines[4], device="cpu")
    ranks = [child for child in children() if child not in before]
    ranks[1].kill()
    assert_gone(ranks)
    with pytest.raises(RanksEnded, match=r"^rank 2 of 4 was ended by SIGKILL$"):
        greedy(llm)


def test_a_rank_that_dies_in_the_middle(engines: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    llm = LLM(engines[2], device="cpu")
    [rank] = [child for child in children() if child not in before]
    stream = llm.stream([PROMPT], PARAMS)
    next(stream)
    rank.kill()
    with pytest.raises(RanksEnded, match=r"^rank 1 of 2 was ended by SIGKILL$"):
        stream.result()


def test_ranks_end_with_their_parent(engines: dict[int, Path], expected: list[int]) -> None:
    with start(engines[2], "wait") as program:
        assert program.stdout is not None
        ranks, tokens = json.loads(program.stdout.readline())
        assert len(ranks) == 1 and tokens == expected
        running = processes_of(ranks)
        program.kill()
        assert_gone(running)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, -signal.SIGINT), ("fail", 1)])
def test_ranks_end_with_an_interrupt_or_an_error(
    engines: dict[int, Path], how: signal.Signals | str, status: int
) -> None:
    with start(engines[2], "fail" if how == "fail" else "wait") as program:
        assert program.stdout is not None
        ranks, _ = json.loads(program.stdout.readline())
        running = processes_of(ranks)
        if isinstance(how, signal.Signals):
            program.send_signal(how)
        assert program.wait(SECONDS) == status
        assert_gone(running)


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_processes_of_a_launcher(engines: dict[int, Path], expected: list[int], launcher: str) -> None:
    names = {"torchrun": ("RANK", "WORLD_SIZE"), "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}[launcher]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    programs = [start(engines[2], **dict(zip(names, (str(rank), "2"), strict=True)), **meeting) for rank in range(2)]
    outputs = [program.communicate(timeout=60) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    assert json.loads(outputs[0][0]) == [[], expected]
    assert outputs[1][0] == "", "the other rank's program ends where it made its LLM"


def test_a_rank_of_a_launcher_that_dies(engines: dict[int, Path]) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    first, second = (start(engines[2], "wait", RANK=str(rank), **meeting) for rank in range(2))
    assert first.stdout is not None and first.stdout.readline()
    first.kill()
    _, err = second.communicate(timeout=SECONDS)
    assert second.returncode != 0 and "RuntimeError" in err
    first.communicate()


def test_refuses_another_number_of_processes(
    engines: dict[int, Path], llms: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for engine, ranks in ((engines[2], 2), (llms["tiny"].engine.path, 1)):
        with pytest.raises(UserError) as refusal:
            LLM(engine, device="cpu")
        assert str(refusal.value).startswith(f"{engine}: tp_size is {ranks}, WORLD_SIZE is 3; start {ranks} processes")


def test_refuses_a_launcher_that_does_not_say_where_to_meet(
    engines: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    told = r"OMPI_COMM_WORLD_SIZE is 2, and MASTER_ADDR must say where to meet; .*-x MASTER_ADDR="
    with pytest.raises(UserError, match=told):
        LLM(engines[2], device="cpu")


def test_refuses_missing_files_before_anything_starts(
    engines: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    shutil.copytree(engines[2], tmp_path / "engine")
    (tmp_path / "engine/target/rank1.safetensors").unlink()
    with pytest.raises(UserError, match=r"target/rank1\.safetensors: is missing; tp_size is 2 in config\.json"):
        LLM(tmp_path / "engine", device="cpu")


def test_what_another_rank_refuses_is_refused(engines: dict[int, Path], tmp_path: Path) -> None:
    shutil.copytree(engines[2], tmp_path / "engine")
    file = tmp_path / "engine/target/rank1.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].float()}, file, metadata)
    with pytest.raises(
        UserError, match=r"^rank 1: .*target/rank1.safetensors: model.norm.weight is float32, the engine"
    ):
        LLM(tmp_path / "engine", device="cpu")


def test_what_launchers_say() -> None:
    assert launched_world({}) is None
    assert launched_world({"RANK": "1"}) is None, "set by something else"
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launched_world(torchrun) == World(5, 8, 1, 4, "WORLD_SIZE")
    mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    mpi["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4"
    assert launched_world(mpi) == World(5, 8, 1, 4, "OMPI_COMM_WORLD_SIZE")
    with pytest.raises(UserError, match="WORLD_SIZE is 'two', it must be a number"):
        launched_world({"RANK": "0", "WORLD_SIZE": "two"})


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [share_of_cores(ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
