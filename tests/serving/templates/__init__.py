"""Chat templates that tests render."""

from __future__ import annotations

from pathlib import Path

QWEN3, LLAMA3 = ((Path(__file__).parent / f"{name}.jinja").read_text() for name in ("qwen3", "llama3"))
