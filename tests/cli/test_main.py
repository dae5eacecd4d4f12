"""How the command line ends when the fault is ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt import __version__
from tests.cli.invoke import invoke


def test_our_failure_is_one_line_and_a_traceback_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("dflash_trt.engine.inspection.describe", broken)
    result = invoke(capsys, "inspect", tmp_path)
    assert result.status == 1
    assert result.err == (
        "dflash-trt: internal error, RuntimeError: two lines (--debug before the command shows where)\n"
    )
    debugged = invoke(capsys, "--debug", "inspect", tmp_path)
    assert debugged.status == 1 and "Traceback" in debugged.err and "broken" in debugged.err


def test_console_script() -> None:
    script = Path(sys.executable).with_name("dflash-trt")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert __version__ in result.stdout


@pytest.mark.parametrize("command", ["build", "run", "inspect", "doctor", "demo"])
def test_help_is_fast_and_complete(command: str) -> None:
    """Help imports no torch, and every option has a word of explanation."""
    code = (
        "import sys; from dflash_trt.cli.main import cli\n"
        "try: cli([sys.argv[1], '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules, 'help imports torch'"
    )
    result = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert "Usage:" in result.stdout
