"""Runs the demo and keeps what it prints as docs/demo.svg, the picture of the README.

python docs/picture.py
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import rich.console

from dflash_trt.cli.demo import demo

console = rich.console.Console(record=True, width=100, force_terminal=True, highlight=False)
with patch.object(rich.console, "Console", lambda **options: console if "stderr" not in options else _quiet()):

    def _quiet() -> rich.console.Console:
        return type(console)(stderr=True, force_terminal=False)

    demo.main(["--max_output_len", "64"], standalone_mode=False)
console.save_svg(str(Path(__file__).with_name("demo.svg")), title="dflash-trt demo")
