"""Whether Triton is here, which modules that hold kernels import."""

from __future__ import annotations

from importlib.util import find_spec

from dflash_trt.errors import UserError


def require_triton(purpose: str) -> None:
    """Refuse what cannot be done without Triton.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("triton") is None:
        raise UserError(f"triton is not installed, which {purpose} needs; pip install dflash-trt[plugins]")
