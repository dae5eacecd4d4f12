"""What the networks of a pair ask of the plugin is what the plugin's operations take and give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt

from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.ops.tensorrt_plugin_ops import PluginOps
from dflash_trt.plugins.registration import registered
from tests.engine.recorded import for_tensorrt, rank_pairs
from tests.engine.recorded_plugins import RecordedPlugins
from tests.plugins.tensorrt_plugin import ask, tensorrt_plugin
from tests.quantized_models import quantized_drafter, quantized_target
from tests.tiny_models import random_drafter, random_target


class CheckedPlugins(RecordedPlugins):
    """Placeholders whose types and shapes are seen to be those that TensorRT gets of the operation."""

    def __init__(self, network: trt.INetworkDefinition) -> None:
        super().__init__(network)
        self.seen: Counter[str] = Counter()

    def __call__(self, name: str, inputs: Sequence[trt.ITensor], **attributes: Any) -> list[trt.ITensor]:
        dims = [
            tuple(f"{index}.{axis}" if size < 0 else size for axis, size in enumerate(tensor.shape))
            for index, tensor in enumerate(inputs)
        ]
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


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_the_networks_of_a_pair_ask_for_what_there_is(tmp_path: Path, is_fp8: bool) -> None:
    paths = tmp_path / "target", tmp_path / "drafter"
    if is_fp8:
        target = quantized_target(paths[0], "W4A16_NVFP4", fp8_cache=True)
        quantized_drafter(paths[1], target, "FP8", fp8_cache=True)
    else:
        random_drafter(paths[1], random_target(paths[0], "qwen3"))
    config, pairs = rank_pairs(*paths, tmp_path / "engine", dtype="bfloat16", tp_size=2)
    config = for_tensorrt(config, plugins=True)
    seen: Counter[str] = Counter()
    with tensorrt_plugin():
        for record in (record_target, record_drafter):
            builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
            network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            checked = CheckedPlugins(network)
            ops = PluginOps(trt, network, checked, config.speculative_config.block_size, rank=1, ranks=2)
            record(ops, pairs[1], config)
            seen += checked.seen
    layers = config.pretrained_config.num_hidden_layers, config.speculative_config.num_hidden_layers
    assert seen["block_attention_partial"] == seen["block_attention_combine"] == sum(layers)
    assert seen["kv_write"] == layers[0] + 1 + layers[1]
    assert seen["verify_partial"] == seen["verify_combine"] == 2
