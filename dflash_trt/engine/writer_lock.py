"""One process at a time writes to a place; the system takes the lock back however that process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.errors import UserError


@contextmanager
def only_writer(place: Path, lock: Path) -> Iterator[None]:
    """Hold a place against other processes that ask for it here.

    Args:
        place: what is written, for the message.
        lock: a file beside it, which is gone afterwards. One that a process has left which was killed is taken over.

    Raises:
        UserError: another process holds it.
        OSError: the lock cannot be made.
    """
    descriptor = _locked(place, lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(place: Path, lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(lock, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"{place}: another process is building into it; wait for that, or stop it") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed the file since it was opened


def _is_still(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False
