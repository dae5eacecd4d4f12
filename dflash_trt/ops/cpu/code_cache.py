"""Machine code of kernels, kept in the user's cache between processes."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

_DIGEST = 32
"""Bytes of a file that say what the others are: half a file is none."""


def code_file(*what: str) -> Path:
    """Where the code that comes of this IR, by this LLVM, for this processor, is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dflash-trt" / "kernels" / f"{hashlib.sha256(chr(0).join(what).encode()).hexdigest()[:32]}.o"


def read_code(file: Path) -> bytes | None:
    """The code in a file; None where there is none, or not all of it."""
    try:
        held = file.read_bytes()
    except OSError:
        return None
    digest, code = held[:_DIGEST], held[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_code(file: Path, code: bytes) -> None:
    """Keep it for the next start. A cache that cannot be written costs no more than compiling anew."""
    part = file.with_suffix(f".{secrets.token_hex(8)}")
    with suppress(OSError):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(code).digest() + code)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
