"""`dflash-trt convert --report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.invoke import Result, invoke
from tests.conftest import TINY

TEXT = TINY / "prompts.txt"
W4A16 = ("--qformat", "w4a16_nvfp4", "--drafter_qformat", "w4a16_nvfp4")


def convert(capsys: pytest.CaptureFixture[str], output: Path, *options: object) -> Result:
    pair = ("--target_dir", TINY / "target", "--drafter_dir", TINY / "drafter")
    return invoke(capsys, "convert", *pair, "--output_dir", output, *W4A16, *options)


def test_prints_and_writes_what_it_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report may lie in the directory that the conversion makes."""
    monkeypatch.setenv("COLUMNS", "120")  # names of layers in one line
    output, file = tmp_path / "output", tmp_path / "output" / "quality.json"
    result = convert(capsys, output, "--report", file, "--report_dataset", TEXT, "--report_seq_len", 48)
    assert (result.status, result.err) == (0, "")
    report = json.loads(file.read_text())
    assert report["original"] == {name: str(TINY / name) for name in ("target", "drafter")}
    assert report["converted"] == {name: str(output / name) for name in ("target", "drafter")}
    assert report["text"]["tokens"] == 47 and report["not_run"] == {}
    assert report["acceptance"]["converted"]["acceptance_length"] >= 1
    for name in ("target", "drafter"):
        nvfp4 = report["weights"][name]["formats"][-1 if name == "drafter" else 0]
        assert nvfp4["format"] == "W4A16_NVFP4"
        assert nvfp4["worst_layer"] in result.out and f"{nvfp4['worst_relative_error']:.2%}" in result.out
    for number in ("original_perplexity", "converted_perplexity"):
        assert f"{report['text'][number]:.3f}" in result.out
    assert f"{report['text']['greedy_agreement']:.2%}" in result.out


def test_no_name_is_cut_where_lines_are_short(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = convert(capsys, tmp_path / "output", "--report", tmp_path / "quality.json")
    assert "worst layer" in result.out and "…" not in result.out


def test_without_text_says_what_was_not_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = convert(capsys, tmp_path / "output", "--report", tmp_path / "quality.json")
    assert result.status == 0, result.err
    for what in ("perplexity and agreement", "acceptance length"):
        assert f"{what}: not measured, no held-out text was given (--report_dataset)" in result.out
    assert json.loads((tmp_path / "quality.json").read_text())["text"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--report_dataset", TEXT), "--report_dataset needs --report"),
        (("--report", "r.json", "--report_size", 2), "--report_size needs --report_dataset"),
        (("--report", "r.json", "--report_seq_len", 9), "--report_seq_len needs --report_dataset"),
        (("--report", "r.json", "--report_dtype", "bfloat16"), "--report_dtype needs --report_dataset"),
        (("--report", "/proc/r.json"), "/proc/r.json: cannot be written"),
        (("--report", "r.json", "--report_dataset", "none.txt"), "none.txt: no such file"),
        (("--report", TINY), "is a directory"),
        (("--report", "output"), "output: is a directory; give --report a file"),
        (("--report", "output/target"), "output/target: is a directory; give --report a file"),
    ],
)
def test_mistakes_are_refused_before_anything_is_converted(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = convert(capsys, tmp_path / "output", *options)
    assert result.status == 2 and message in result.err, result.err
    assert not list(tmp_path.iterdir())
