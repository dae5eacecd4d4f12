"""Paths that name no file: told at once, whatever would wait or never end if it were opened."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.checkpoint.regular_file import check_file, is_file, read_file
from dflash_trt.errors import UserError


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a pipe; it must be a file"),
    "socket": (bound_socket, "is a socket; it must be a file"),
    "directory": (Path.mkdir, "is a directory; it must be a file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device; it must be a file"),
    "link to nothing": (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which is not there"),
    "link to itself": (lambda path: path.symlink_to(path), "is a link that leads back to itself"),
}
"""Each made at a path, and what is said of it."""


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("use", [is_file, check_file, read_file])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, use: Callable[[Path], object]) -> None:
    make, message = NO_FILES[kind]
    make(tmp_path / "it")
    with pytest.raises(UserError, match=f"^{tmp_path / 'it'}: {message}$"):
        use(tmp_path / "it")


@pytest.mark.parametrize("name", ["absent", "file/below", "null\0byte", "\ud800"])
def test_what_is_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    assert not is_file(tmp_path / name)
    with pytest.raises(UserError, match="no such file"):
        check_file(tmp_path / name)


def test_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert is_file(tmp_path / "link") and read_file(tmp_path / "link", 7) == b"content"


def test_a_file_may_be_no_larger_than_it_needs(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="file: is larger than 1000 bytes"):
        read_file(tmp_path / "file", 1000)


def test_what_the_system_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("x: cannot be read (File name too long)")):
        is_file(tmp_path / ("x" * 300))
    (tmp_path / "file").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match="file: cannot be read"):
        read_file(tmp_path / "file")
