"""Running the command line in this process, as the console script does."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from dflash_trt.cli.main import main


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


def invoke(capsys: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Exit status, stdout and stderr of `dflash-trt ARGUMENTS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)
