"""The group of commands: help, and how it ends when the fault is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dflash_trt import __version__
from dflash_trt.cli.main import cli
from dflash_trt.engine.processes import environment_of_children
from tests.cli.invoke import invoke
from tests.conftest import TINY

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def test_our_failure_is_one_line_and_a_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("dflash_trt.inspection.describe.describe", broken)
    result = invoke(capsys, "inspect", tmp_path)
    assert result.status == 1
    assert result.err == (
        "dflash-trt: internal error, RuntimeError: two lines (--debug before the command shows where)\n"
    )
    debugged = invoke(capsys, "--debug", "inspect", tmp_path)
    assert debugged.status == 1 and "Traceback" in debugged.err and "broken" in debugged.err
    # An argument of that name is no request.
    assert "Traceback" not in invoke(capsys, "inspect", "--", "--debug").err


def test_a_full_disk_is_not_our_failure() -> None:
    script = Path(sys.executable).with_name("dflash-trt")
    with open("/dev/full", "w") as full:
        result = subprocess.run([script, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "dflash-trt: No space left on device\n")


def test_console_script() -> None:
    script = Path(sys.executable).with_name("dflash-trt")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert __version__ in result.stdout


def test_without_a_command_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    result = invoke(capsys)
    assert result.status == 0 and result.err == ""
    assert result.out == invoke(capsys, "--help").out
    for command in cli.commands:
        assert f"\n  {command} " in result.out


@pytest.mark.parametrize("command", [cli, *cli.commands.values()], ids=lambda command: command.name)
def test_every_option_has_a_help_text(command: click.Command) -> None:
    context = click.Context(command)
    for parameter in command.get_params(context):
        assert isinstance(parameter, click.Argument) or parameter.help, parameter.name


@pytest.mark.parametrize("command", list(cli.commands))
def test_help_imports_no_torch(command: str) -> None:
    """So that it is there at once."""
    code = (
        "import sys; from dflash_trt.cli.main import cli\n"
        "try: cli([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'help imports torch'"
    )
    result = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert "Usage:" in result.stdout


def test_termination_leaves_nothing_half_written(tmp_path: Path) -> None:
    """As a service manager ends a build: SIGTERM while weights are being written."""
    code = (
        "import sys, time; import dflash_trt.engine.parts as parts\n"
        "def slow(*arguments):\n"
        "    print('writing', flush=True); time.sleep(60)\n"
        "    yield\n"
        "parts._converted = slow\n"
        "from dflash_trt.cli.main import main\n"
        "sys.argv[0] = 'dflash-trt'; main()"
    )
    arguments = ["build", "--checkpoint_dir", str(TINY), "--output_dir", str(tmp_path / "engine")]
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        assert list(tmp_path.iterdir()), "nothing was begun"
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "0"), ({"OMP_WAIT_POLICY": "active"}, "30000000000"), ({"GOMP_SPINCOUNT": "1234"}, "1234")],
)
def test_threads_sleep_while_they_wait_unless_the_user_has_chosen(chosen: dict[str, str], spins: str) -> None:
    """By what OpenMP says itself when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment |= chosen | {"OMP_DISPLAY_ENV": "verbose"}
    script = Path(sys.executable).with_name("dflash-trt")
    told = subprocess.run([script, "doctor"], env=environment, capture_output=True, text=True, check=True).stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in told


@pytest.mark.parametrize("name", WAITING)
def test_ranks_wait_as_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in WAITING:
        monkeypatch.delenv(each, raising=False)
    assert environment_of_children(1)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv(name, "active")
    assert {each: environment_of_children(1).get(each) for each in WAITING} == dict.fromkeys(WAITING) | {name: "active"}
