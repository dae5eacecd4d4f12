"""Kernels that were compiled before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.ops.cpu import code_cache
from dflash_trt.ops.cpu import linear as module
from dflash_trt.ops.cpu.linear import linear


def test_code_is_used_again_and_half_a_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, weight = torch.randn(3, 48), torch.randn(20, 48)
    expected = linear(x, weight)

    def compiled_anew() -> bytes:
        module._kernel.cache_clear()
        assert torch.equal(linear(x, weight), expected)
        (file,) = (tmp_path / "dflash-trt" / "kernels").iterdir()
        return file.read_bytes()

    code = compiled_anew()
    monkeypatch.setattr("dflash_trt.ops.cpu.kernel.write_code", lambda *_: pytest.fail("compiled though it was there"))
    assert compiled_anew() == code
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (file,) = (tmp_path / "dflash-trt" / "kernels").iterdir()
    file.write_bytes(code[:-100])
    assert code_cache.read_code(file) is None
    assert compiled_anew() == code


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dflash-trt").write_text("a file where a directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._kernel.cache_clear()
    x, weight = torch.randn(3, 48), torch.randn(20, 48)
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)
