"""The hash follows whatever the kernels inside an engine depend on."""

from __future__ import annotations

import re
import shutil
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


@pytest.mark.parametrize("changed", ["verify.py", "noise.py", "kernel.py", "registration.py"])
def test_a_changed_source_changes_it(sources: Path, changed: str) -> None:
    before = plugin_hash()
    (sources / changed).write_text((sources / changed).read_text() + "\n")
    assert plugin_hash() != before


def test_another_triton_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plugin_hash()
    monkeypatch.setattr(module, "version", lambda package: "0.0")
    assert plugin_hash() != before


def test_the_command_s_looks_do_not(sources: Path) -> None:
    before = plugin_hash()
    (sources / "compile.py").write_text("")
    assert plugin_hash() == before
