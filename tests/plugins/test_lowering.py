"""What the networks of a pair ask of the plugin is what the plugin's operations take and give."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt

from dflash_trt.engine.config import Builder, EngineConfig
from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import _ops
from dflash_trt.models.pair import Pair
from dflash_trt.ops.tensorrt_plugin_ops import PluginOps
from dflash_trt.plugins.registration import registered
from tests.engine.recorded import for_tensorrt, rank_pairs
from tests.engine.recorded_plugins import RecordedPlugins
from tests.plugins.tensorrt_plugin import QuickPluginCreationRequest, ask, tensorrt_plugin
from tests.quantized_models import quantized_drafter, quantized_target
from tests.tiny_models import random_drafter, random_target


class CheckedPlugins(RecordedPlugins):
    """Placeholders whose types and shapes are seen to be those that TensorRT gets of the operation."""

    def __init__(self, network: trt.INetworkDefinition) -> None:
        super().__init__(network)
        self.seen: Counter[str] = Counter()

    def __call__(self, name: str, inputs: Sequence[trt.ITensor], **attributes: Any) -> list[trt.ITensor]:
        dims = [dims_of(index, tensor) for index, tensor in enumerate(inputs)]
        made = getattr(registered(), name)(*inputs, **attributes, compute_capability=103)
        result = ask(made, inputs, dims)
        outputs = super().__call__(name, inputs, **attributes)
        assert result.types == [tensor.dtype for tensor in outputs]
        for shape, tensor in zip(result.shapes, outputs, strict=True):
            assert len(shape) == len(tensor.shape)
            # Of tests, chunks of a vocabulary are smaller, and a part of attention is of any number of rows.
            known = list(zip(shape, tensor.shape, strict=True))[: 2 if name == "verify_partial" else None]
            for size, placed in known[2 if name == "block_attention_partial" else 0 :]:
                assert not size.is_constant() or size.get_constant_value() == placed
        self.seen[name] += 1
        return outputs


class NetworkWithPlugins:
    """A network of `tensorrt_rtx` that takes plugins as `tensorrt`'s do: asked for everything, with placeholders."""

    def __init__(self, network: trt.INetworkDefinition) -> None:
        self._network = network
        self.kernels: Counter[str] = Counter()
        self.targets: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def add_plugin(self, operation: Any, aot: bool) -> Added:
        assert aot
        inputs, _, _ = operation(QuickPluginCreationRequest.STRICT_AOT)
        result = ask(operation, inputs, [dims_of(index, tensor) for index, tensor in enumerate(inputs)])
        self.kernels[result.name] += 1
        self.targets |= set(re.findall(r"^\.target (\w+)", result.ptx, re.MULTILINE))
        outputs = []
        for index, (kind, dims) in enumerate(zip(result.types, result.shapes, strict=True)):
            shape = [size.get_constant_value() if size.is_constant() else -1 for size in dims]
            name = f"{result.name} {self.kernels[result.name]} {index}"
            placed = self._network.add_input(name, kind, shape)
            outputs.append(self._network.add_identity(placed).get_output(0))
        return Added(outputs)


@dataclass(frozen=True)
class Added:
    """A layer of outputs."""

    outputs: list[trt.ITensor]

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    def get_output(self, index: int) -> trt.ITensor:
        return self.outputs[index]


def dims_of(index: int, tensor: trt.ITensor) -> tuple[int | str, ...]:
    return tuple(f"{index}.{axis}" if size < 0 else size for axis, size in enumerate(tensor.shape))


@pytest.fixture(params=["bf16", "fp8"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[EngineConfig, list[Pair]]:
    """Two ranks' parts, with caches of the engine's type or in FP8."""
    paths = tmp_path / "target", tmp_path / "drafter"
    if request.param == "fp8":
        target = quantized_target(paths[0], "W4A16_NVFP4", fp8_cache=True)
        quantized_drafter(paths[1], target, "FP8", fp8_cache=True)
    else:
        random_drafter(paths[1], random_target(paths[0], "qwen3"))
    return rank_pairs(*paths, tmp_path / "engine", dtype="bfloat16", tp_size=2)


def new_network() -> tuple[trt.Builder, trt.INetworkDefinition]:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    return builder, builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def check_counts(config: EngineConfig, seen: Counter[str], prefix: str = "") -> None:
    layers = config.pretrained_config.num_hidden_layers, config.speculative_config.num_hidden_layers
    assert seen == {
        f"{prefix}block_attention_partial": sum(layers),
        f"{prefix}block_attention_combine": sum(layers),
        f"{prefix}kv_write": layers[0] + 1 + layers[1],
        f"{prefix}verify_partial": 2,
        f"{prefix}verify_combine": 2,
    }


def test_the_networks_of_a_pair_ask_for_what_there_is(pair: tuple[EngineConfig, list[Pair]]) -> None:
    config, pairs = pair
    config = for_tensorrt(config, plugins=True)
    seen: Counter[str] = Counter()
    with tensorrt_plugin():
        for record in (record_target, record_drafter):
            _builder, network = new_network()
            checked = CheckedPlugins(network)
            ops = PluginOps(trt, network, checked, config.speculative_config.block_size, rank=1, ranks=2)
            record(ops, pairs[1], config)
            seen += checked.seen
    check_counts(config, seen)


def test_a_build_adds_them_to_its_network(pair: tuple[EngineConfig, list[Pair]]) -> None:
    """What a build with the plugin records, up to the network that only `tensorrt` can build."""
    config, pairs = pair
    tensorrt = load_tensorrt("tensorrt_rtx")
    config = replace(config, builder=Builder("tensorrt", tensorrt.version, "sm103", "of a test"))
    seen: Counter[str] = Counter()
    with tensorrt_plugin():
        for record in (record_target, record_drafter):
            _builder, network = new_network()
            taking = NetworkWithPlugins(network)
            ops = _ops(tensorrt, taking, config, rank=1)
            bindings = record(ops, pairs[1], config)
            assert (ops.rank, ops.ranks) == (1, 2)
            outputs = {network.get_output(index).name for index in range(network.num_outputs)}
            assert outputs == {each.name for each in bindings.outputs}
            assert taking.targets == {"sm_103a"}
            seen += taking.kernels
    check_counts(config, seen, "dflash_")
