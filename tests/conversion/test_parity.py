"""What a conversion writes is, byte for byte, what ModelOpt exports of the same weights with the same calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.conversion.calibration_text import read_samples
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats, KVCacheQFormat, QFormat
from dflash_trt.examples.smollm2 import write_bfloat16_checkpoint
from tests.conversion.conftest import modelopt_export

MakePair = Callable[[str, torch.dtype], Path]


def convert(source: Path, output: Path, formats: Formats, text: Path) -> Path:
    needs_text = formats.qformat in ("fp8", "nvfp4") or formats.kv_cache_qformat == "fp8"
    data = CalibrationData(text, size=8, max_length=64) if needs_text else None
    plan_conversion(open_target(source), formats, None, Formats("bf16"), data, output).run()
    return output / "target"


def assert_same(ours: Path, theirs: Path) -> None:
    """Names, types, shapes and bytes of every tensor, and the two files that describe them."""
    tensors, expected = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        other = expected[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        assert torch.equal(*(one.contiguous().flatten().view(torch.uint8) for one in (tensor, other))), name
    for file in ("config.json", "hf_quant_config.json"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes(), file


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
@pytest.mark.parametrize("qformat", ["fp8", "nvfp4", "w4a16_nvfp4"])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("llama", torch.float32)]
)
def test_tiny_models(
    tmp_path: Path,
    pair: MakePair,
    text: Path,
    family: str,
    dtype: torch.dtype,
    qformat: QFormat,
    kv_cache: KVCacheQFormat,
) -> None:
    source = pair(family, dtype) / "target"
    ours = convert(source, tmp_path / "ours", Formats(qformat, kv_cache), text)
    samples = read_samples(text, load_tokenizer(source), 8, 64)
    modelopt_export(source, tmp_path / "theirs", qformat, samples, kv_cache=kv_cache == "fp8")
    assert_same(ours, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("patterns", "disabled"),
    [
        (("model.layers.1.*",), ("*layers.1.*",)),
        (("*o_proj", "*down_proj"), ("*o_proj*", "*down_proj*")),
        (("*.k_proj",), ("*.k_proj.*",)),
    ],
)
def test_excluded_modules(
    tmp_path: Path, pair: MakePair, text: Path, patterns: tuple[str, ...], disabled: tuple[str, ...]
) -> None:
    source = pair("qwen3", torch.bfloat16) / "target"
    ours = convert(source, tmp_path / "ours", Formats("fp8", exclude_modules=patterns), text)
    samples = read_samples(text, load_tokenizer(source), 8, 64)
    modelopt_export(source, tmp_path / "theirs", "fp8", samples, disabled=disabled)
    assert_same(ours, tmp_path / "theirs")


@pytest.mark.parametrize(("qformat", "kv_cache"), [("fp8", "none"), ("nvfp4", "fp8")])
def test_smollm2(tmp_path: Path, text: Path, qformat: QFormat, kv_cache: KVCacheQFormat) -> None:
    source = tmp_path / "source"
    write_bfloat16_checkpoint(source)
    AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(source)  # transformers' own config.json
    ours = convert(source, tmp_path / "ours", Formats(qformat, kv_cache), text)
    samples = read_samples(text, load_tokenizer(source), 8, 64)
    modelopt_export(source, tmp_path / "theirs", qformat, samples, kv_cache=kv_cache == "fp8")
    assert_same(ours, tmp_path / "theirs")
