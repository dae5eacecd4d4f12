"""What is declared, where it is not supported, and where two files disagree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.declaration import Declaration, read_declaration
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.errors import UserError

NVFP4 = QuantizationConfig("NVFP4", "FP8", ("lm_head",))


def write(directory: Path, inside: Any = None, beside: Any = None) -> Path:
    config = {"quantization_config": inside} if inside is not None else {}
    (directory / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    return directory


def test_nothing(tmp_path: Path) -> None:
    assert read_declaration(write(tmp_path)) == Declaration(tmp_path / "config.json")


def test_the_same_in_either_place_and_in_both(tmp_path: Path) -> None:
    inside, beside = NVFP4.to_quantization_config(), NVFP4.to_hf_quant_config()
    for config, file, source in (
        (inside, None, "config.json"),
        (inside, beside, "config.json"),
        (None, beside, "hf_quant_config.json"),
    ):
        assert read_declaration(write(tmp_path, config, file)) == Declaration(tmp_path / source, NVFP4)


def test_the_order_of_excluded_modules_means_nothing(tmp_path: Path) -> None:
    one, other = (QuantizationConfig("FP8", None, names) for names in (("a", "b"), ("b", "a")))
    read = read_declaration(write(tmp_path, one.to_quantization_config(), other.to_hf_quant_config()))
    assert read.contradictions == ()


def test_every_contradiction_has_a_line(tmp_path: Path) -> None:
    other = QuantizationConfig("FP8", None, ("embed",))
    read = read_declaration(write(tmp_path, NVFP4.to_quantization_config(), other.to_hf_quant_config()))
    assert read.quantization == NVFP4
    assert [line.partition("config.json: ")[2][:45] for line in read.contradictions] == [
        'quantization_config says that quant_algo is "',
        "quantization_config says that kv_cache_quant_",
        "quantization_config.ignore names lm_head, hf_",
        "quantization.exclude_modules names embed, con",
    ]


@pytest.mark.parametrize(
    ("inside", "stated"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, {"quant_method": "mxfp4"}),
        ({"quant_method": "awq", "bits": 4}, {"quant_method": "awq", "bits": 4}),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, {"quant_method": "modelopt", "quant_algo": "W4A8"}),
    ],
)
def test_what_is_not_supported_is_stated(tmp_path: Path, inside: dict[str, Any], stated: dict[str, Any]) -> None:
    read = read_declaration(write(tmp_path, inside))
    assert read.quantization is None and read.stated == stated and read.contradictions == ()
    assert read.unsupported is not None and "not supported; supported " in read.unsupported


def test_one_unsupported_place_is_enough(tmp_path: Path) -> None:
    beside = NVFP4.to_hf_quant_config()
    beside["quantization"]["quant_algo"] = "MIXED_PRECISION"
    read = read_declaration(write(tmp_path, NVFP4.to_quantization_config(), beside))
    assert read.quantization is None and "MIXED_PRECISION" in str(read.unsupported)
    assert len(read.contradictions) == 1


@pytest.mark.parametrize(("inside", "beside"), [("FP8", None), (None, {"quantization": 1}), (None, [])])
def test_damage_is_refused(tmp_path: Path, inside: Any, beside: Any) -> None:
    with pytest.raises(UserError, match=r"must (be an|hold a JSON) object"):
        read_declaration(write(tmp_path, inside, beside))
