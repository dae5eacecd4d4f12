"""The hash that an engine's config.json keeps of the kernels inside it."""

from __future__ import annotations

import hashlib
from pathlib import Path

_BESIDE = {
    *("__init__.py", "plugin_hash.py", "installed_triton.py", "compile.py", "interpretation.py"),
    *("shapes.py", "heads.py", "noise.py", "kv_write.py", "block_attention.py", "verify.py"),
}
"""What no engine holds: tools, checks, and what the operations are in torch."""


def plugin_hash() -> str:
    """Sixteen hexadecimal digits: SHA-256 of the sources of the kernels and of what TensorRT is told of them.

    Which Triton compiled them is no part of it: an engine holds its kernels compiled.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _BESIDE:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
