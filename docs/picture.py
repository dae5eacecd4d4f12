"""Runs the demo and keeps what it prints as docs/demo.svg, the picture of the README.

python docs/picture.py
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from unittest.mock import patch

import rich.console
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.text import Text

from dflash_trt.cli.demo import demo

WIDTH = 100
Console = rich.console.Console

printed = Console(file=io.StringIO(), force_terminal=True, color_system="standard", highlight=False, width=WIDTH)
with patch.object(rich.console, "Console", lambda **options: Console(**options) if "stderr" in options else printed):
    demo.main(["--max_output_len", "64"], standalone_mode=False)

# The demo leaves long lines to the terminal, which folds them; so does this second console.
picture = Console(file=io.StringIO(), record=True, width=WIDTH)
picture.print(Text.from_ansi(printed.file.getvalue()))  # type: ignore[attr-defined]
# The viewer's own monospaced font: the picture asks no other host for one.
plain_format = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")
picture.save_svg(str(Path(__file__).with_name("demo.svg")), title="dflash-trt demo", code_format=plain_format)
