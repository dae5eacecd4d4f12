"""Writing a directory whole or not at all, whatever its name leads to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.engine.directory import check_output_dir, check_output_file, written_whole
from dflash_trt.errors import UserError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def config(number: str) -> str:
    return f'{{"speculative_config": {{}}, "builder": {{}}, "build_config": {number}}}'


def write(output_dir: Path, content: str = "{}") -> None:
    with written_whole(output_dir) as directory:
        (directory / "config.json").write_text(config(content))


def content(output_dir: Path) -> str:
    return (output_dir / "config.json").read_text()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """What counts as an engine directory to replace, alone in its parent."""
    write(tmp_path / "parent/engine", "1")
    return tmp_path / "parent/engine"


def test_the_current_directory_is_replaced(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(engine)
    write(Path("."), "2")
    assert content(engine) == config("2")
    assert names(engine.parent) == ["engine"]


def test_a_file_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "held").write_text("held")
    (tmp_path / "link").symlink_to(tmp_path / "nothing yet")
    for name in ("held", "link", "new"):
        check_output_file(tmp_path / name)
    assert names(tmp_path) == ["held", "link"] and (tmp_path / "held").read_text() == "held"
    for name in ("held/file", "missing/file", "."):
        with pytest.raises(UserError, match=r"cannot be written|is a directory; it must be a file"):
            check_output_file(tmp_path / name)


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_stays_and_what_it_names_is_written(tmp_path: Path, exists: bool) -> None:
    if exists:
        write(tmp_path / "real", "1")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "2")
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "real"]
    assert content(tmp_path / "real") == config("2")


def test_permissions_are_what_the_user_asks_of_every_directory(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "engine")
    finally:
        os.umask(before)
    assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_at_the_end_keeps_the_old_engine(
    engine: Path, monkeypatch: pytest.MonkeyPatch, failing: int, failure: BaseException
) -> None:
    """Whichever of the two renames fails."""
    calls = 0
    rename = Path.rename

    def fail(source: Path, destination: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise failure
        return rename(source, destination)

    monkeypatch.setattr(Path, "rename", fail)
    expected = UserError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as raised:
        write(engine, "2")
    if expected is UserError:
        assert str(raised.value) == f"{engine}: cannot be written (No space left on device)"
    assert content(engine) == config("1")
    assert names(engine.parent) == ["engine"]


def test_a_failure_inside_is_let_through_and_leaves_nothing(tmp_path: Path) -> None:
    """An input that cannot be read is no fault of the output, and parents that were made go again."""
    for failure in (PermissionError(13, "Permission denied"), KeyboardInterrupt()):
        with pytest.raises(type(failure)), written_whole(tmp_path / "some/where/engine") as directory:
            (directory / "file").touch()
            raise failure
        assert names(tmp_path) == []


def foreign(root: Path) -> Iterator[Path]:
    """Places that must be left alone."""
    for name, text in (("number", "3"), ("text", '"build_config"'), ("list", '["build_config"]'), ("broken", "{")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
        yield root / name
    (root / "of TensorRT-LLM").mkdir()
    theirs = '{"version": "0.17.0", "pretrained_config": {}, "build_config": {}}'
    (root / "of TensorRT-LLM/config.json").write_text(theirs)
    yield root / "of TensorRT-LLM"
    write(root / "with a user's file")
    (root / "with a user's file/notes.txt").touch()
    yield root / "with a user's file"
    (root / "file").touch()
    yield root / "file"
    (root / "loop").symlink_to(root / "loop")
    yield root / "loop"


def test_anything_else_is_refused_at_once(tmp_path: Path) -> None:
    for place in foreign(tmp_path):
        before = names(tmp_path)
        for check in (check_output_dir, write):
            with pytest.raises(UserError, match=f"^{place}: exists and is no engine directory"):
                check(place)
        assert names(tmp_path) == before


@pytest.mark.parametrize("place", ["/proc/engine", "/proc/self/status/engine"])
def test_a_place_that_cannot_be_written_is_refused_at_once(place: str) -> None:
    with pytest.raises(UserError, match=f"^{place}: cannot be written"):
        check_output_dir(Path(place))


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be renamed when all is written."""
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(UserError, match="volume: is a mount point"):
        check_output_dir(tmp_path / "volume")


HOLD = """
import sys
from pathlib import Path
from dflash_trt.engine.directory import written_whole

with written_whole(Path(sys.argv[1])) as directory:
    (directory / "large").write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
    (directory / "large").unlink()
    (directory / "config.json").write_text(sys.argv[2])
"""


@contextmanager
def another_process(output_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """One that is writing there, and ends when its stdin closes."""
    command = [sys.executable, "-c", HOLD, str(output_dir), config("9")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        yield process


@pytest.mark.parametrize("replaces", [False, True])
def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, replaces: bool) -> None:
    engine = tmp_path / "engine"
    if replaces:
        write(engine, "1")
    with another_process(engine) as process:
        process.kill()
    assert len(names(tmp_path)) == 2 + replaces
    write(engine, "2")
    assert names(tmp_path) == ["engine"] and content(engine) == config("2")


def test_a_second_build_is_told_of_the_first_and_leaves_it_alone(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    with another_process(engine) as process:
        before = names(tmp_path)
        with pytest.raises(UserError, match=f"^{engine}: another process is building into it"):
            write(engine)
        assert names(tmp_path) == before
        write(tmp_path / "other", "3")
        process.communicate()
    assert process.returncode == 0
    assert names(tmp_path) == ["engine", "other"] and content(engine) == config("9")


def test_an_engine_that_a_killed_build_had_set_aside_comes_back(engine: Path) -> None:
    """Killed between the two renames."""
    engine.rename(engine.with_name(".engine.dflash-trt-old"))
    engine.with_name(".engine.dflash-trt-new").mkdir()
    engine.with_name(".engine.dflash-trt-lock").touch()
    with pytest.raises(KeyboardInterrupt), written_whole(engine):
        raise KeyboardInterrupt
    assert names(engine.parent) == ["engine"] and content(engine) == config("1")


def test_an_output_file_that_would_wait_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is a pipe; it must be a file"):
        check_output_file(tmp_path / "pipe")
