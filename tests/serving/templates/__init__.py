"""Chat templates that tests render, one of each kind that models have."""

from __future__ import annotations

from pathlib import Path

TEMPLATES = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("*.jinja"))}
QWEN3, LLAMA3 = TEMPLATES["qwen3"], TEMPLATES["llama3"]
