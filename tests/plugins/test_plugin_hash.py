"""The hash follows whatever the kernels inside an engine depend on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.plugins import plugin_hash as module
from dflash_trt.plugins.plugin_hash import plugin_hash


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plugin that is hashed instead."""
    for path in Path(module.__file__).parent.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "plugin_hash.py"))
    return tmp_path


def test_it_is_the_same_wherever_the_plugin_is(sources: Path) -> None:
    here = plugin_hash()
    assert re.fullmatch("[0-9a-f]{16}", here)
    elsewhere = sources / "elsewhere"
    elsewhere.mkdir()
    for path in sources.glob("*.py"):
        shutil.move(path, elsewhere)
    module.__file__ = str(elsewhere / "plugin_hash.py")
    assert plugin_hash() == here


SOURCES = sorted(path.name for path in Path(module.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("changed", SOURCES)
def test_it_changes_with_whatever_an_engine_holds(sources: Path, changed: str) -> None:
    """Files with a kernel in them, and what configures, compiles and registers those."""
    before = plugin_hash()
    text = (sources / changed).read_text()
    (sources / changed).write_text(text + "\n")
    machinery = ("attention_shares.py", "gpus.py", "kernel.py", "operation.py", "operations.py", "registration.py")
    assert (plugin_hash() != before) == ("@triton.jit" in text or changed in machinery)


def test_it_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; from dflash_trt.plugins.plugin_hash import plugin_hash as f; print(f())"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout == (
        plugin_hash() + "\n"
    )
