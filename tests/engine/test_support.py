"""The rules of what can be built, held to what TensorRT really builds, and what is said where one refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dflash_trt.checkpoint.open_checkpoint import (
    DrafterCheckpoint,
    TargetCheckpoint,
    open_drafter,
    open_target,
)
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.engine.config import BuildConfig, Dtype
from dflash_trt.engine.network import record_drafter
from dflash_trt.engine.support import COMPUTE_CAPABILITIES, Feature, check_support, is_supported
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import build_plan
from dflash_trt.errors import UserError
from dflash_trt.models.pair import Pair, load_pair
from tests.tensorrt_engines import OPTIONS, TensorRTEngines

QFORMATS: dict[Feature, str] = {"FP8": "fp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "w4a16_nvfp4"}
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def loaded(checkpoints: Path, dtype: torch.dtype) -> Pair:
    target, drafter = open_target(checkpoints / "target"), open_drafter(checkpoints / "drafter")
    return load_pair(
        TargetCheckpoint(checkpoints, target.config, target.weights),
        DrafterCheckpoint(checkpoints, drafter.config, drafter.weights),
        positions=OPTIONS["max_seq_len"] + drafter.config.block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def test_compute_capabilities_are_those_of_the_library() -> None:
    known = load_tensorrt("tensorrt_rtx").trt.ComputeCapability.__members__
    assert {name.lower() for name in known} - {"none", "current"} == set(COMPUTE_CAPABILITIES["tensorrt_rtx"])


@pytest.mark.parametrize("whose", ["target", "drafter"])
def test_heads_that_the_plugin_does_not_take(tensorrt_engines: TensorRTEngines, whose: str) -> None:
    checkpoints = tensorrt_engines.checkpoints("bf16")
    configs: dict[str, Any] = {
        "target": open_target(checkpoints / "target").config,
        "drafter": open_drafter(checkpoints / "drafter").config,
    }
    build = BuildConfig(dtype="bfloat16")
    for head_dim in (16, 240, 256):
        taken = {**configs, whose: replace(configs[whose], head_dim=head_dim)}
        check_support("tensorrt", "sm103", build, taken["target"], taken["drafter"])
    for head_dim in (8, 24, 272):
        refused = {**configs, whose: replace(configs[whose], head_dim=head_dim)}
        with pytest.raises(UserError) as refusal:
            check_support("tensorrt", "sm103", build, refused["target"], refused["drafter"])
        assert str(refusal.value) == (
            f"the {whose} has a head_dim of {head_dim}, the plugin of tensorrt takes multiples of 16 up to 256; give "
            "--backend torch, or tensorrt_rtx for an RTX GPU"
        )
        check_support("tensorrt_rtx", "sm120", build, refused["target"], refused["drafter"])


@pytest.mark.parametrize("feature", [*DTYPES, *QFORMATS])
def test_rules_are_what_tensorrt_builds(
    tensorrt_engines: TensorRTEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: Feature
) -> None:
    """For every GPU: what is allowed builds, what is refused does not. The drafter's network, which is the smaller."""
    monkeypatch.setattr("dflash_trt.engine.build.check_support", lambda *arguments: None)
    qformat, dtype = QFORMATS.get(feature, "bf16"), feature if feature in DTYPES else "float16"
    pair = loaded(tensorrt_engines.checkpoints(qformat), getattr(torch, dtype))
    built = []
    for capability in COMPUTE_CAPABILITIES["tensorrt_rtx"]:
        config = tensorrt_engines.plan(qformat, tmp_path / "engine", capability, dtype=dtype).config
        try:
            build_plan(load_tensorrt("tensorrt_rtx"), record_drafter, pair, config, 0, lambda piece: None)
            built.append(capability)
        except UserError as refusal:
            assert f"cannot build this network for {capability}" in str(refusal)
        except KeyError:
            assert dtype == "float64"  # TensorRT has no such type
    known = COMPUTE_CAPABILITIES["tensorrt_rtx"]
    assert built == [each for each in known if is_supported(feature, "tensorrt_rtx", each)]


def test_native_layers_do_not_cache_in_fp8(tensorrt_engines: TensorRTEngines) -> None:
    tensorrt = load_tensorrt("tensorrt_rtx")
    builder = tensorrt.trt.Builder(tensorrt.logger)
    network = builder.create_network(0)
    cache = network.add_input("cache", tensorrt.trt.fp8, (1, 2, 16, 8))
    rows = network.add_input("rows", tensorrt.trt.bfloat16, (1, 2, 4, 8))
    starts = network.add_input("starts", tensorrt.trt.int32, (1,))
    tensorrt.logger.errors.clear()
    layer = network.add_kv_cache_update(cache, rows, starts, tensorrt.trt.KVCacheMode.LINEAR)
    network.mark_output(layer.get_output(0))
    assert builder.build_serialized_network(network, builder.create_builder_config()) is None
    assert "must have type Float, Half, or BFloat16" in tensorrt.logger.last_error
    assert not any(is_supported("FP8 caches", "tensorrt_rtx", each) for each in COMPUTE_CAPABILITIES["tensorrt_rtx"])


FP8, NVFP4 = (QuantizationConfig(algo, None, ()) for algo in ("FP8", "NVFP4"))
FP8_CACHES = QuantizationConfig(None, "FP8", ())


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "target", "drafter", "message"),
    [
        (
            "tensorrt_rtx",
            "sm89",
            "bfloat16",
            NVFP4,
            None,
            "the target is NVFP4, which tensorrt_rtx does not build for sm89; convert it with fp8 or bf16, or give "
            "--compute_capability sm120 or sm121",
        ),
        (
            "tensorrt_rtx",
            "sm86",
            "bfloat16",
            None,
            FP8,
            "the drafter is FP8, which tensorrt_rtx does not build for sm86; convert it with bf16, or give "
            "--compute_capability sm89 or sm120 or sm121",
        ),
        (
            "tensorrt_rtx",
            "sm75",
            "bfloat16",
            None,
            None,
            "dtype is bfloat16, which tensorrt_rtx does not build for sm75; give --dtype float16, or give "
            "--compute_capability sm80 or sm86 or sm89 or sm120 or sm121",
        ),
        (
            "tensorrt_rtx",
            "sm120",
            "float64",
            None,
            None,
            "dtype is float64, which tensorrt_rtx does not build for sm120; give --dtype float32 or bfloat16 or float16",
        ),
        (
            "tensorrt_rtx",
            "sm120",
            "bfloat16",
            FP8_CACHES,
            None,
            "the target has FP8 caches, which tensorrt_rtx does not build for sm120; convert with --kv_cache_qformat "
            "none, or give --backend tensorrt",
        ),
        (
            "tensorrt",
            "sm90",
            "bfloat16",
            NVFP4,
            None,
            "the target is NVFP4, which tensorrt does not build for sm90; convert it with fp8 or bf16, or give "
            "--compute_capability sm100 or sm103 or sm120",
        ),
        (
            "tensorrt_rtx",
            "sm90",
            "bfloat16",
            None,
            None,
            "compute_capability is sm90, backend tensorrt_rtx builds for sm75, sm80, sm86, sm89, sm120, sm121, or give "
            "--backend tensorrt",
        ),
        (
            "tensorrt",
            None,
            "bfloat16",
            None,
            None,
            "compute_capability is not given, backend is tensorrt, whose engines are for one GPU; give "
            "--compute_capability sm80 or sm86 or sm89 or sm90 or sm100 or sm103 or sm120",
        ),
        (
            "torch",
            "sm90",
            "bfloat16",
            None,
            None,
            "compute_capability is sm90, backend is torch, whose engines run on any GPU; leave out "
            "--compute_capability, or give --backend tensorrt_rtx",
        ),
    ],
)
def test_refusals_say_what_would_work(
    tensorrt_engines: TensorRTEngines,
    backend: Any,
    capability: str | None,
    dtype: Dtype,
    target: QuantizationConfig | None,
    drafter: QuantizationConfig | None,
    message: str,
) -> None:
    checkpoints = tensorrt_engines.checkpoints("bf16")
    of_target = replace(open_target(checkpoints / "target").config, quantization=target)
    of_drafter = replace(open_drafter(checkpoints / "drafter").config, quantization=drafter)
    with pytest.raises(UserError) as refused:
        check_support(backend, capability, BuildConfig(dtype=dtype), of_target, of_drafter)
    assert str(refused.value) == message


def test_fp8_caches_are_for_the_plugin(tensorrt_engines: TensorRTEngines) -> None:
    checkpoints = tensorrt_engines.checkpoints("bf16")
    target = replace(open_target(checkpoints / "target").config, quantization=FP8_CACHES)
    check_support(
        "tensorrt", "sm80", BuildConfig(dtype="bfloat16"), target, open_drafter(checkpoints / "drafter").config
    )
