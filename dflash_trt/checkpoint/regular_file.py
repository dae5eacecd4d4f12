"""What a user's path names: a regular file, or a refusal that says what stands there instead.

Opening a pipe waits for a writer that may never come, and a device may have no end. So a path is looked at first.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dflash_trt.errors import UserError, access

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_file(path: Path) -> bool:
    """Whether a regular file is there, links followed; False where nothing is.

    Raises:
        UserError: something else is there, a link that leads nowhere, or the system does not say.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path can have such a name
        if os.path.islink(path):
            raise UserError(f"{path}: is a link to {os.readlink(path)}, which is not there") from None
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{path}: is a link that leads back to itself") from None
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'something else')}; it must be a file")
    return True


def check_file(path: Path) -> None:
    """As `is_file`, where a file is required.

    Raises:
        UserError: also where nothing is there.
    """
    if not is_file(path):
        raise UserError(f"{path}: no such file")


def read_file(path: Path, largest: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        largest: bytes that it may have; None for any number.

    Raises:
        UserError: it is not there, no regular file or larger, or the system refuses to read it.
    """
    check_file(path)
    with access(path, "read"), path.open("rb") as file:
        content = file.read() if largest is None else file.read(largest + 1)
    if largest is not None and len(content) > largest:
        raise UserError(f"{path}: is larger than {largest} bytes, more than such a file can need")
    return content
