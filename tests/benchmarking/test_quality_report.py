"""The report's file: keys that stay, numbers that come back, and written whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.benchmarking.acceptance import Acceptance, PairAcceptance
from dflash_trt.benchmarking.quality_report import QualityReport, check_report_file, write_report
from dflash_trt.benchmarking.text_quality import TextQuality
from dflash_trt.benchmarking.weight_error import FormatSummary, LayerError, WeightErrors
from dflash_trt.errors import UserError

REPORT = QualityReport(
    version="0.1.0",
    original={"target": "there/target"},
    converted={"target": "here/target"},
    weights={
        "target": WeightErrors(
            (FormatSummary("FP8", 1, 0.1 / 3, 0.1 / 3, "a"), FormatSummary("float32", 1, 0.0, 0.0, "b")),
            (LayerError("a", "FP8", 0.1 / 3, 29.5, 0.02), LayerError("b", "float32", 0.0, None, 0.0)),
        )
    },
    dtype="float32",
    text=TextQuality(2, 30, 10.25, 10.5, 29 / 30, 1e-3),
    acceptance=Acceptance(2, 64, PairAcceptance(2.5, 5, 2), PairAcceptance(None, 0, 0)),
    not_run={},
)


def keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    return keys(value[0]) if isinstance(value, list) else None


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "some" / "report.json"
    write_report(REPORT, file)
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert found == REPORT.to_dict()
    assert found["weights"]["target"]["layers"][0] == asdict(REPORT.weights["target"].layers[0])
    assert found["text"] == asdict(REPORT.text) and found["acceptance"] == asdict(REPORT.acceptance)
    assert [path.name for path in file.parent.iterdir()] == ["report.json"]


def test_keys_stay() -> None:
    pair = {"acceptance_length": None, "decoded_tokens": None, "verifications": None}
    assert keys(REPORT.to_dict()) == {
        "version": None,
        "original": {"target": None},
        "converted": {"target": None},
        "weights": {
            "target": {
                "formats": {
                    "format": None,
                    "layers": None,
                    "median_relative_error": None,
                    "worst_relative_error": None,
                    "worst_layer": None,
                },
                "layers": {
                    "layer": None,
                    "format": None,
                    "relative_error": None,
                    "snr_db": None,
                    "worst_element": None,
                },
            }
        },
        "dtype": None,
        "text": {
            "samples": None,
            "tokens": None,
            "original_perplexity": None,
            "converted_perplexity": None,
            "greedy_agreement": None,
            "mean_kl_divergence": None,
        },
        "acceptance": {"prompts": None, "max_tokens": None, "original": pair, "converted": pair},
        "not_run": {},
    }


def test_a_place_is_checked_and_left_as_it_was(tmp_path: Path) -> None:
    check_report_file(tmp_path / "a" / "b" / "report.json", tmp_path / "output")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("old")
    check_report_file(tmp_path / "old.json", tmp_path / "output")
    assert (tmp_path / "old.json").read_text() == "old"


def test_a_report_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.mkdir()
    with pytest.raises(UserError, match=r"report\.json: cannot be written"):
        write_report(REPORT, file)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory; give --report a file"):
        check_report_file(tmp_path, tmp_path / "output")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/report\.json: cannot be written \(Not a directory\)"):
        check_report_file(tmp_path / "file" / "report.json", tmp_path / "output")
    with pytest.raises(UserError, match=r"file/report\.json: cannot be written"):
        write_report(REPORT, tmp_path / "file" / "report.json")
    with pytest.raises(UserError, match=r"/proc/report\.json: cannot be written"):
        check_report_file(Path("/proc/report.json"), tmp_path / "output")
