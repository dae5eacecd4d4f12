"""The hash that an engine's config.json keeps of the kernels inside it."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

_BESIDE = ("__init__.py", "compile.py", "plugin_hash.py")
"""What no kernel depends on."""


def plugin_hash() -> str:
    """Sixteen hexadecimal digits: SHA-256 of the kernels' sources, their registration and Triton's version."""
    digest = hashlib.sha256(version("triton").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in _BESIDE:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
