"""Whole reports: of nothing lost, of something lost, of what does not fit, and of what cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_trt.benchmarking import quality
from dflash_trt.benchmarking.quality import (
    HeldOutText,
    Models,
    machine_memory,
    measure_quality,
    read_held_out_text,
)
from dflash_trt.benchmarking.quality_report import QualityReport
from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.conversion.convert import plan_conversion
from dflash_trt.conversion.plan import Formats, QFormat
from dflash_trt.errors import UserError
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from tests.benchmarking.conftest import models
from tests.checkpoint import tiny_gguf
from tests.checkpoint.test_gguf_tokenizer import BYTE_LEVEL
from tests.conftest import build_pair
from tests.tiny_models import random_drafter, random_target

Convert = Callable[[QFormat], Path]
ENOUGH = machine_memory()


def measure(original: Path, converted: Path, text: HeldOutText | None, memory: int = ENOUGH) -> QualityReport:
    return measure_quality(models(original), models(converted), text, memory=memory)


def test_bf16_of_bf16_loses_nothing(trained: Path, converted: Convert, text: HeldOutText) -> None:
    report = measure(trained, converted("bf16"), text)
    for errors in report.weights.values():
        assert [summary.format for summary in errors.formats] == ["bfloat16"]
        assert all(layer.relative_error == layer.worst_element == 0 for layer in errors.layers)
    assert report.text is not None and report.acceptance is not None and not report.not_run
    assert report.text.original_perplexity == report.text.converted_perplexity
    assert (report.text.greedy_agreement, report.text.mean_kl_divergence) == (1, 0)
    assert report.acceptance.original == report.acceptance.converted
    assert report.dtype == "float32"


@pytest.mark.parametrize("qformat", ["fp8", "nvfp4"])
def test_of_a_quantized_pair(trained: Path, converted: Convert, text: HeldOutText, qformat: QFormat) -> None:
    report = measure(trained, converted(qformat), text)
    assert report.text is not None and report.acceptance is not None
    assert 0.5 < report.text.greedy_agreement < 1 and 0 < report.text.mean_kl_divergence < 1
    assert report.text.converted_perplexity == pytest.approx(report.text.original_perplexity, rel=0.3)
    assert report.text.tokens == sum(len(ids) - 1 for ids in text.samples)
    for pair in (report.acceptance.original, report.acceptance.converted):
        assert pair.acceptance_length == pair.decoded_tokens / pair.verifications > 1.5


def test_acceptance_is_that_of_engines(tmp_path: Path, trained: Path, converted: Convert, text: HeldOutText) -> None:
    """Of the first halves of the samples, up to the end token or 64 tokens."""
    found = measure(trained, converted("fp8"), text).acceptance
    assert found is not None
    for name, source, ours in (("one", trained, found.original), ("other", converted("fp8"), found.converted)):
        llm: LLM = build_pair(tmp_path / name, source / "target", source / "drafter", dtype="float32", max_seq_len=256)
        prompts = [list(ids[: len(ids) // 2]) for ids in text.samples]
        statistics = llm.generate(
            prompts, SamplingParams(max_tokens=64), verify_window=llm.executor.max_window
        ).statistics
        assert (ours.acceptance_length, ours.verifications) == (
            statistics.acceptance_length,
            statistics.verifications,
        )


def test_without_text_only_weights_are_compared(trained: Path, converted: Convert) -> None:
    report = measure(trained, converted("w4a16_nvfp4"), None)
    assert report.text is report.acceptance is report.dtype is None
    assert report.not_run.keys() == {"text", "acceptance"}
    assert all("no held-out text was given" in reason for reason in report.not_run.values())
    assert report.weights.keys() == {"target", "drafter"}


def test_without_a_drafter_nothing_is_decoded(trained: Path, converted: Convert, text: HeldOutText) -> None:
    original, after = models(trained), models(converted("w4a16_nvfp4"))
    report = measure_quality(replace(original, drafter=None), replace(after, drafter=None), text, memory=ENOUGH)
    assert report.not_run == {"acceptance": "no drafter was converted"}
    assert report.text is not None and report.weights.keys() == report.original.keys() == {"target"}


def test_of_a_gguf_target(tmp_path: Path) -> None:
    """Its tensors are unpacked to float32, of which BF16 loses something too."""
    tiny_gguf.write(tmp_path / "model.gguf", changes=BYTE_LEVEL)
    original = Models(open_target(tmp_path / "model.gguf"), None)
    (tmp_path / "text.txt").write_text("abcdefgh")
    text = read_held_out_text(tmp_path / "text.txt", original.target, size=1, max_length=9, dtype=torch.float32)
    errors = []
    for qformat in ("bf16", "w4a16_nvfp4"):
        plan_conversion(original.target, Formats(qformat), None, Formats("bf16"), None, tmp_path / qformat).run()
        after = Models(open_target(tmp_path / qformat / "target"), None)
        report = measure_quality(original, after, text, memory=ENOUGH)
        assert report.text is not None and report.text.tokens == len(text.samples[0]) - 1
        errors.append(report.weights["target"].formats[0].median_relative_error)
    assert 0 < errors[0] < 0.01 < errors[1] < 0.2


def test_what_does_not_fit_is_not_run(
    trained: Path, converted: Convert, text: HeldOutText, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are counted from the files: BF16 becomes four bytes, packed weights stay as they are."""

    def parameters(pair: Models, name: str) -> int:
        weights = getattr(pair, name).weights
        return sum(torch.Size(weights.shape(tensor)).numel() for tensor in weights.names())

    original = models(trained)
    target, drafter = (4 * parameters(original, name) for name in ("target", "drafter"))
    monkeypatch.setattr(quality, "compare_on_text", None)
    report = measure(trained, converted("bf16"), text, memory=target + drafter)
    assert report.text is None and report.acceptance is not None and report.dtype == "float32"
    assert report.not_run == {
        "text": f"the weights of both targets take {2 * target / 1e9:.2f} GB in float32, this machine has "
        f"{(target + drafter) / 1e9:.2f} GB of memory"
    }
    monkeypatch.setattr(quality, "measure_acceptance", None)
    report = measure(trained, converted("bf16"), text, memory=target + drafter - 1)
    assert report.not_run.keys() == {"text", "acceptance"} and report.dtype is None
    halved = measure(
        trained, converted("bf16"), replace(text, dtype=torch.bfloat16), memory=(target + drafter) // 2 - 1
    )
    assert "in bfloat16" in halved.not_run["acceptance"]


def test_packed_weights_take_what_their_files_do(
    trained: Path, converted: Convert, text: HeldOutText, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = models(converted("nvfp4")).target.weights
    packed = 0
    for name in after.names():
        dtype, numbers = after.dtype(name), torch.Size(after.shape(name)).numel()
        packed += numbers * (4 if dtype == torch.bfloat16 else dtype.itemsize)
    before = models(trained).target.weights
    needed = packed + 4 * sum(torch.Size(before.shape(name)).numel() for name in before.names())
    original, quantized = (replace(models(path), drafter=None) for path in (trained, converted("nvfp4")))
    assert "text" not in measure_quality(original, quantized, text, memory=needed).not_run
    assert "text" in measure_quality(original, quantized, text, memory=needed - 1).not_run


def test_refuses_models_that_were_not_made_from_each_other(tmp_path: Path, trained: Path, converted: Convert) -> None:
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target"))
    with pytest.raises(UserError, match=r"target: was not made from .*target: vocab_size is 97 here and 697 there"):
        measure(trained, tmp_path, None)
    with pytest.raises(UserError, match="target: is quantized itself"):
        measure(converted("fp8"), converted("fp8"), None)
    with pytest.raises(UserError, match="must both have a drafter, or neither"):
        measure_quality(models(trained), replace(models(trained), drafter=None), None, memory=ENOUGH)


def test_text_is_read_as_it_is_for_calibration(trained: Path, tmp_path: Path) -> None:
    target = open_target(trained / "target")

    def read(content: str) -> HeldOutText:
        (tmp_path / "text.txt").write_text(content)
        return read_held_out_text(tmp_path / "text.txt", target, size=2, max_length=5, dtype=torch.float32)

    assert [len(ids) for ids in read("The market was cold.\n\nx\n\nNo third.").samples] == [5]
    with pytest.raises(UserError, match=r"text\.txt: its samples are single tokens"):
        read("x")


def test_refuses_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    random_target(tmp_path / "target", vocab_size=97)
    random_target(tmp_path / "small", vocab_size=40)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "small" / file).write_bytes((tmp_path / "target" / file).read_bytes())
    (tmp_path / "text.txt").write_text("~~~")
    with pytest.raises(UserError, match=r"outside a vocabulary of 40; the tokenizer of .*small is another model's"):
        read_held_out_text(
            tmp_path / "text.txt", open_target(tmp_path / "small"), size=1, max_length=9, dtype=torch.float32
        )
