"""Predicted memory is that of the networks and of the tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.bindings import Model, engine_bindings, shared_weights
from dflash_trt.engine.build import plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.memory import predict_memory
from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.engine.tensorrt_api import TensorRTName, load_tensorrt
from dflash_trt.ops.tensorrt_ops import TensorRTOps
from dflash_trt.ops.tensorrt_plugin_ops import PluginOps
from dflash_trt.quantization.nvfp4 import quantize_nvfp4
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO
from tests.engine.recorded import CPU, rank_pairs
from tests.engine.recorded_plugins import RecordedPlugins
from tests.models.test_dflash import as_speculators
from tests.quantized_models import quantized_drafter, quantized_target
from tests.tensorrt_engines import OPTIONS
from tests.tiny_models import random_drafter, random_target


def tied(root: Path) -> None:
    random_drafter(root / "drafter", random_target(root / "target", "qwen3", tie_word_embeddings=True))


def untied(root: Path) -> None:
    random_drafter(root / "drafter", random_target(root / "target"))


def own_head(root: Path) -> None:
    target = random_target(root / "target")
    random_drafter(root / "z-lab", target)
    as_speculators(root / "z-lab", root / "drafter", [3, 4, 9, 40], target.lm_head.weight[[3, 4, 9, 40]].clone())


def quantized_head(root: Path) -> None:
    quantized_drafter(root / "drafter", quantized_target(root / "target", "NVFP4"), "NVFP4")
    file = root / "target/model.safetensors"
    tensors = load_file(file)
    packed = quantize_nvfp4(tensors.pop("lm_head.weight"), "lm_head.weight")._asdict()
    scale = tensors["model.layers.0.mlp.up_proj.input_scale"].clone()
    head = {f"lm_head.{field}": tensor for field, tensor in packed.items()}
    save_file({**tensors, **head, "lm_head.input_scale": scale}, file)
    for name, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):
        content = json.loads((root / "target" / name).read_text())
        content["quantization_config" if key == "ignore" else "quantization"][key] = []
        (root / "target" / name).write_text(json.dumps(content))


BACKENDS = get_args(TensorRTName)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pair", [tied, untied, own_head, quantized_head])
def test_constants(tmp_path: Path, pair: Callable[[Path], None], ranks: int, backend: TensorRTName) -> None:
    """Constants that are no weights are a few kilobytes: positions, masks, numbers."""
    pair(tmp_path)
    options = {**OPTIONS, "tp_size": ranks}
    target, drafter = open_target(tmp_path / "target"), open_drafter(tmp_path / "drafter")
    build = plan_build(target, drafter, BuildConfig(**options), tmp_path / "engine", backend, "sm120")
    memory = predict_memory(build)
    _, (loaded, *_) = rank_pairs(tmp_path / "target", tmp_path / "drafter", tmp_path / "torch", **options)
    tensorrt = load_tensorrt("tensorrt_rtx")
    builder = tensorrt.trt.Builder(tensorrt.logger)
    for record, predicted in ((record_target, memory.target_weights), (record_drafter, memory.drafter_weights)):
        network = builder.create_network(1 << int(tensorrt.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        ops = (
            PluginOps(tensorrt.trt, network, RecordedPlugins(network), drafter.config.block_size, ranks=ranks)
            if build.config.builder.uses_plugins
            else TensorRTOps(tensorrt.trt, network, ranks=ranks)
        )
        record(ops, loaded, build.config)
        held = {tensor.data_ptr(): tensor.nbytes for tensor in ops.layers._held}
        assert 0 <= sum(held.values()) - predicted < 2000
    embedding, head = loaded.target_weights.embedding, loaded.target_weights.head.weight
    has_head_input = pair in (untied, own_head)
    assert memory.shared_weights == embedding.nbytes + (head.nbytes if has_head_input else 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_and_outputs_are_what_is_allocated(tmp_path: Path, backend: TensorRTName) -> None:
    """And a pass of every profile's greatest sizes fits into it."""
    untied(tmp_path)
    target, drafter = open_target(tmp_path / "target"), open_drafter(tmp_path / "drafter")
    build = plan_build(target, drafter, BuildConfig(**OPTIONS), tmp_path / "engine", backend, "sm120")
    models: tuple[Model, ...] = get_args(Model)
    caches = {model: CacheStorage.allocate(model, build.config, CPU) for model in models}
    shared = {each.name: torch.zeros(1) for each in shared_weights(build.config, head=True)}
    allocated = 0
    for bindings in engine_bindings(build.config).values():
        io = EngineIO(bindings, caches, shared, CPU)
        for profile in bindings.profiles.values():
            bound = io.bind({size: values.most for size, values in profile.items()})
        own = [tensor for name, tensor in bound.items() if name not in shared and "." not in name]  # caches have dots
        allocated += sum(tensor.untyped_storage().nbytes() for tensor in own)
    assert allocated == predict_memory(build).inputs_and_outputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_are_those_of_the_tables(tmp_path: Path, backend: TensorRTName) -> None:
    """Native caches of a pass of all slots, and the plugin's of all slots, take what a rank allocates."""
    untied(tmp_path)
    target, drafter = open_target(tmp_path / "target"), open_drafter(tmp_path / "drafter")
    build = plan_build(target, drafter, BuildConfig(**OPTIONS), tmp_path / "engine", backend, "sm120")
    tables = engine_bindings(build.config)
    caches = [binding for binding in tables["target"].inputs if binding.name.endswith((".keys", ".values"))]
    sizes = (
        math.prod(size if isinstance(size, int) else OPTIONS["max_batch_size"] for size in binding.shape)
        * binding.dtype.itemsize
        for binding in caches
    )
    assert sum(sizes) == build.config.cache_bytes == predict_memory(build).caches
