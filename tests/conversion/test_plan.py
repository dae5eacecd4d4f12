"""What is quantized, what is left, and what cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modelopt.torch.export.quant_utils import _prefix_wildcard_summarize_exclude_modules

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.conversion.plan import Formats, plan_drafter, plan_target, summarize
from dflash_trt.errors import UserError
from tests.tiny_models import random_drafter, random_target

MakePair = Callable[[str, torch.dtype], Path]

modules = st.lists(
    st.sampled_from(["model", "layers", "1", "10", "11", "mlp", "q", "q_proj"]), min_size=1, max_size=4
).map(".".join)


@given(st.sets(modules, min_size=1, max_size=12), st.data())
def test_exclusions_are_gathered_as_modelopt_gathers_them(names: set[str], data: st.DataObject) -> None:
    quantized = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1))
    unquantized = names - quantized
    found = summarize(unquantized, quantized)
    assert list(found) == sorted(_prefix_wildcard_summarize_exclude_modules(sorted(unquantized), sorted(quantized)))
    assert not any(fnmatchcase(name, pattern) for name in quantized for pattern in found)


def test_heads_and_embeddings_are_left(pair: MakePair) -> None:
    llama = plan_target(open_target(pair("llama", torch.bfloat16) / "target"), Formats("fp8"))
    tied = plan_target(open_target(pair("qwen3", torch.bfloat16) / "target"), Formats("fp8"))
    for plan in (llama, tied):
        assert plan.quantization is not None
        assert plan.quantization.exclude_modules == ("lm_head", "model.embed_tokens")
        assert len(plan.quantized) == 4 * 7


def test_the_fusion_layer_of_a_drafter_is_left(pair: MakePair) -> None:
    plan = plan_drafter(open_drafter(pair("llama", torch.bfloat16) / "drafter"), Formats("fp8"))
    assert plan.quantization is not None
    assert plan.quantization.exclude_modules == ("fc",)
    assert len(plan.quantized) == 2 * 7


def test_formats_of_one_model_do_not_reach_the_other(pair: MakePair) -> None:
    directory = pair("llama", torch.bfloat16)
    target = plan_target(open_target(directory / "target"), Formats("bf16"))
    drafter = plan_drafter(open_drafter(directory / "drafter"), Formats("nvfp4", "fp8"))
    assert target.quantization is None and not target.attentions and "hf_quant_config.json" not in target.files
    assert "quantization_config" not in json.loads(target.files["config.json"])
    assert drafter.attentions == {"layers.0.self_attn", "layers.1.self_attn"}


def test_fused_layers_are_those_that_are_quantized(pair: MakePair) -> None:
    target = open_target(pair("qwen3", torch.bfloat16) / "target")
    plan = plan_target(target, Formats("fp8", exclude_modules=("*.k_proj",)))
    attention, mlp = "model.layers.2.self_attn", "model.layers.2.mlp"
    assert plan.fused_with(f"{attention}.q_proj") == (f"{attention}.q_proj", f"{attention}.v_proj")
    assert plan.fused_with(f"{mlp}.up_proj") == (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    assert plan.fused_with(f"{mlp}.down_proj") == (f"{mlp}.down_proj",)


@pytest.mark.parametrize("already", [{}, {"quantization_config": None}])
def test_bf16_says_so_in_the_config(tmp_path: Path, already: dict[str, Any]) -> None:
    random_target(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | already))
    plan = plan_target(open_target(tmp_path), Formats("bf16"))
    assert json.loads(plan.files["config.json"])["dtype"] == "bfloat16"


def test_a_null_declaration_is_none(tmp_path: Path) -> None:
    random_target(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None, "dtype": "float32"}))
    config = json.loads(plan_target(open_target(tmp_path), Formats("bf16")).files["config.json"])
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        (Formats("nvfp4", exclude_modules=("*",)), "exclude_modules *: leaves nothing of"),
        (Formats("nvfp4", exclude_modules=("*.qkv_proj",)), "exclude_modules *.qkv_proj: matches no linear layer of"),
        (Formats("bf16", exclude_modules=("*.q_proj",)), "exclude_modules *.q_proj: "),
    ],
)
def test_refuses_patterns_that_do_nothing_or_too_much(pair: MakePair, formats: Formats, message: str) -> None:
    source = pair("llama", torch.bfloat16)
    with pytest.raises(UserError) as refusal:
        plan_target(open_target(source / "target"), formats)
    assert str(refusal.value).startswith(message)
    with pytest.raises(UserError) as refusal:
        plan_drafter(open_drafter(source / "drafter"), formats)
    assert str(refusal.value).startswith(f"drafter_{message}")  # that is the option for it


def test_names_a_layer_that_could_be_left_out(pair: MakePair) -> None:
    """Not `fc`, which is left anyway."""
    drafter = open_drafter(pair("llama", torch.bfloat16) / "drafter")
    with pytest.raises(UserError, match=r"a layer is named like layers\.0\.self_attn\.q_proj$"):
        plan_drafter(drafter, Formats("fp8", exclude_modules=("*.qkv_proj",)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"intermediate_size": 72}, "model.layers.0.mlp.down_proj.weight has 72 columns, no multiple of 16"),
        ({"torch_dtype": torch.float64}, "has type float64; what can be quantized is float32, bfloat16 or float16: "),
    ],
)
def test_refuses_weights_that_cannot_be_quantized(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    dtype = overrides.pop("torch_dtype", torch.float32)
    random_target(tmp_path, "llama", **overrides).to(dtype).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refusal:
        plan_target(open_target(tmp_path), Formats("nvfp4"))
    assert message in str(refusal.value)


def test_fp8_takes_any_width(tmp_path: Path) -> None:
    random_target(tmp_path, "llama", intermediate_size=72)
    assert plan_target(open_target(tmp_path), Formats("fp8")).algo == "FP8"


@pytest.mark.parametrize("qformat", ["bf16", "fp8"])
def test_refuses_what_is_quantized_already(tmp_path: Path, qformat: Any) -> None:
    target = random_target(tmp_path / "target")
    random_drafter(tmp_path / "drafter", target)
    for name in ("target", "drafter"):
        file = tmp_path / name / "config.json"
        quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(UserError, match=r"target: is quantized already \(FP8\); give the checkpoint that it was made"):
        plan_target(open_target(tmp_path / "target"), Formats(qformat))
    with pytest.raises(UserError, match=r"drafter: is quantized already \(FP8\)"):
        plan_drafter(open_drafter(tmp_path / "drafter"), Formats(qformat))


def test_a_drafters_example_prompts_go_with_it(pair: MakePair) -> None:
    drafter = pair("llama", torch.bfloat16) / "drafter"
    (drafter / "example_prompts.txt").write_bytes("Où?\n".encode())
    files = plan_drafter(open_drafter(drafter), Formats("fp8")).files
    assert files["example_prompts.txt"] == "Où?\n".encode()
