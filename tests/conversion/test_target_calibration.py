"""Calibration of targets against ModelOpt's own quantization of transformers' models."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import modelopt.torch.quantization as mtq
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dflash_trt.checkpoint.open_checkpoint import TargetCheckpoint, open_target
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.conversion.calibration import Calibration
from dflash_trt.conversion.target_calibration import calibrate_target
from dflash_trt.errors import UserError
from dflash_trt.models.pair import target_manifest
from tests.checkpoint import tiny_gguf
from tests.tiny_models import random_target

SAMPLES = [[3, 50, 7, 9, 60, 60, 4], [5], list(range(30, 80))]
UP = "model.layers.0.mlp.up_proj"


def linears(target: TargetCheckpoint) -> list[str]:
    """Every linear layer but the head, which ModelOpt's presets leave out."""
    names = [name for name, shape in target_manifest(target).floats.items() if len(shape) == 2]
    return [name.removesuffix(".weight") for name in names if "embed" not in name and "lm_head" not in name]


def modelopts_own(model: Any, preset: str) -> Calibration:
    """What ModelOpt finds when it is asked to quantize the whole model."""
    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
    mtq.quantize(model, config, lambda model: [model(torch.tensor([ids])) for ids in SAMPLES])

    def amax(quantizer: str) -> dict[str, float]:
        return {
            name.removesuffix(f".{quantizer}"): float(module.amax)
            for name, module in model.named_modules()
            if name.endswith(f".{quantizer}") and module.is_enabled
        }

    return Calibration(amax("input_quantizer"), amax("k_bmm_quantizer"), amax("v_bmm_quantizer"), "")


def assert_same(ours: Calibration, theirs: Calibration) -> None:
    assert (ours.inputs, ours.keys, ours.values) == (theirs.inputs, theirs.keys, theirs.values)
    assert len(ours.inputs) == 7 * len(ours.keys) > 0


@pytest.mark.parametrize("preset", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_equals_modelopt_to_the_bit(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    family: str,
    overrides: dict[str, Any],
    dtype: torch.dtype,
    preset: str,
) -> None:
    random_target(tmp_path, family, **overrides).to(dtype).save_pretrained(tmp_path)
    target = open_target(tmp_path)
    seen: list[int] = []
    capfd.readouterr()
    ours = calibrate_target(target, SAMPLES, linears(target), kv_cache=True, progress=seen.append)
    assert capfd.readouterr() == ("", "")
    assert_same(ours, modelopts_own(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), preset))
    assert seen == [1, 1, 1]
    assert ours.method == (
        f"ModelOpt 0.47.0's max calibration in {str(dtype).removeprefix('torch.')} over 3 samples of 58 tokens in all"
    )


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_equals_modelopt_on_its_weights_in_float32(
    tmp_path: Path, architecture: str, kind: gguf.GGMLQuantizationType
) -> None:
    target = open_target(tiny_gguf.write(tmp_path / "a.gguf", architecture, kind))
    theirs = random_target(
        tmp_path / "theirs",
        architecture,
        tie_word_embeddings=True,
        vocab_size=tiny_gguf.VOCAB,
        hidden_size=tiny_gguf.HIDDEN,
        intermediate_size=tiny_gguf.INTERMEDIATE,
        num_hidden_layers=tiny_gguf.LAYERS,
        head_dim=tiny_gguf.HEAD_DIM,
    )
    theirs.set_attn_implementation("sdpa")
    theirs.load_state_dict({name: target.weights.read(name) for name in target.weights.names()}, strict=False)
    ours = calibrate_target(target, SAMPLES, linears(target), kv_cache=True)
    assert_same(ours, modelopts_own(theirs, "FP8_DEFAULT_CFG"))
    assert "in float32" in ours.method


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    random_target(tmp_path)
    found = calibrate_target(open_target(tmp_path), SAMPLES, [UP], kv_cache=False)
    assert (set(found.inputs), found.keys, found.values) == ({UP}, {}, {})


def test_a_head_sees_every_token(tmp_path: Path) -> None:
    random_target(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    with torch.no_grad():
        states = [model.model(torch.tensor([ids])).last_hidden_state for ids in SAMPLES]
    found = calibrate_target(open_target(tmp_path), SAMPLES, ["lm_head"], kv_cache=False)
    assert found.inputs == {"lm_head": max(float(state.abs().max()) for state in states)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_stay_in_their_file(tmp_path: Path) -> None:
    """Of 48 MB of weights, none may become memory of the process."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=1,
        num_attention_heads=8,
        vocab_size=7168,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    target = open_target(tmp_path)
    calibrate_target(target, [[1]], [UP], kv_cache=False)  # imports, buffers and whatever else is taken once
    peak = 0

    def measure(count: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    before = anonymous_bytes()
    calibrate_target(target, [[1], [2, 3]], [UP], kv_cache=False, progress=measure)
    assert size > 40e6 and peak - before < size / 2


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("model.norm.weight", float("nan"), "model.norm.weight holds NaN or infinity; the checkpoint is damaged"),
        ("model.embed_tokens.weight", float("inf"), "model.embed_tokens.weight holds NaN or infinity"),
        ("lm_head.weight", float("nan"), "lm_head.weight holds NaN or infinity"),
        (
            "model.layers.1.mlp.gate_proj.weight",
            3e38,
            "the input of model.layers.1.mlp.down_proj became infinite or not a number in float32",
        ),
        (
            "model.layers.1.self_attn.k_proj.weight",
            3e38,
            "the keys of model.layers.1.self_attn became infinite or not a number in float32",
        ),
        (
            "model.layers.1.self_attn.v_proj.weight",
            0.0,
            "largest magnitude of the input of model.layers.1.self_attn.o_proj is 0",
        ),
    ],
)
def test_refuses_what_no_scale_can_be_made_from(tmp_path: Path, tensor: str, value: float, message: str) -> None:
    model = random_target(tmp_path)
    with torch.no_grad():
        model.get_parameter(tensor).fill_(value)
    model.save_pretrained(tmp_path)
    target = open_target(tmp_path)
    with pytest.raises(UserError, match=message) as refusal:
        calibrate_target(target, SAMPLES, linears(target), kv_cache=True)
    assert str(refusal.value).startswith(str(tmp_path))


@pytest.mark.parametrize("modules", [None, [UP]])
def test_refuses_activations_that_float16_cannot_hold(tmp_path: Path, modules: list[str] | None) -> None:
    """Also where no layer that is calibrated sees them: after the last one."""
    model = random_target(tmp_path)
    with torch.no_grad():
        model.get_parameter("model.layers.3.mlp.down_proj.weight").fill_(6e4)
    model.half().save_pretrained(tmp_path)
    target = open_target(tmp_path)
    with pytest.raises(UserError, match="the input of lm_head became infinite or not a number in float16"):
        calibrate_target(target, SAMPLES, modules or linears(target), kv_cache=modules is None)


def test_refuses_when_no_token_reached_a_layer(tmp_path: Path) -> None:
    random_target(tmp_path)
    with pytest.raises(UserError, match=f"no calibration token reached {UP}"):
        calibrate_target(open_target(tmp_path), [], [UP], kv_cache=False)


def test_says_how_to_get_modelopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_target(tmp_path)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    with pytest.raises(UserError, match=r"needs NVIDIA ModelOpt .*: pip install dflash-trt\[quantize\]"):
        calibrate_target(open_target(tmp_path), SAMPLES, [UP], kv_cache=False)


def test_refuses_a_quantized_target(tmp_path: Path) -> None:
    random_target(tmp_path)
    quantization = QuantizationConfig("FP8", None, ("lm_head",))
    target = open_target(tmp_path)
    quantized = replace(target, config=replace(target.config, quantization=quantization))
    with pytest.raises(UserError, match="is quantized already"):
        calibrate_target(quantized, SAMPLES, [UP], kv_cache=False)


def test_passes_on_what_goes_wrong(tmp_path: Path) -> None:
    random_target(tmp_path)

    def fail(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_target(open_target(tmp_path), SAMPLES, [UP], kv_cache=True, progress=fail)
