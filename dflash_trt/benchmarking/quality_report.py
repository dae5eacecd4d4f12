"""The quality report of a conversion, and the JSON file that it is kept in."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.benchmarking.acceptance import Acceptance
from dflash_trt.benchmarking.text_quality import TextQuality
from dflash_trt.benchmarking.weight_error import WeightErrors
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.errors import UserError, access


@dataclass(frozen=True)
class QualityReport:
    """What a conversion cost.

    Attributes:
        version: of dflash-trt.
        original, converted: where `target` and, if there is one, `drafter` lie.
        weights: errors of all linear layers of `target` and `drafter`.
        dtype: what the models were run in; None where they were not.
        text: the targets on text.
        acceptance: the pairs decoding.
        not_run: of `text` and `acceptance`, those that are None, and why, in one line each.
    """

    version: str
    original: dict[str, str]
    converted: dict[str, str]
    weights: dict[str, WeightErrors]
    dtype: str | None
    text: TextQuality | None
    acceptance: Acceptance | None
    not_run: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it: attributes are keys, all the way down."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), allow_nan=False))
        return plain


def check_report_file(path: Path, output_dir: Path) -> None:
    """See that a report can be written here when it is made; directories that are missing will be made too.

    Args:
        path: of the report.
        output_dir: of the conversion that will be made before it.

    Raises:
        UserError: it is a directory or will be one, or the system refuses.
    """
    made = [os.path.realpath(part) for part in (output_dir, output_dir / "target", output_dir / "drafter")]
    with access(path, "written"):
        if path.is_dir() or os.path.realpath(path) in made:
            raise UserError(f"{path}: is a directory; give --report a file")
        is_file(path)  # refuses anything else that is there
        ancestor = next(parent for parent in path.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=ancestor):
            pass


def write_report(report: QualityReport, path: Path) -> None:
    """Write it as JSON, whole or not at all.

    Raises:
        UserError: the system refuses.
    """
    new = path.with_name(f"{path.name}.partial")
    with access(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
