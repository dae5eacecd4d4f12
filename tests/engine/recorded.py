"""Both engines of a pair as recorded networks, all ranks of them, run by the interpreter over an executor's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt
import torch
from torch import Tensor

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.bindings import Bindings, Model, shared_weights
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig, EngineConfig
from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.engine.weights import load_rank
from dflash_trt.models.pair import Caches, Pair
from dflash_trt.ops.base import LayerCache
from dflash_trt.ops.tensorrt_ops import UPDATED, TensorRTOps
from dflash_trt.ops.tensorrt_plugin_ops import PluginOps
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.verifier import Step
from tests.engine.recorded_plugins import BLOCK, RecordedPlugins
from tests.models.eager import span
from tests.network_interpreter import Input, NetworkInterpreter

CPU = torch.device("cpu")


def rank_pairs(target: Path, drafter: Path, directory: Path, **options: Any) -> tuple[EngineConfig, list[Pair]]:
    """What each rank of an engine holds, as a network build has it."""
    config = BuildConfig(
        **{"dtype": "float32", "max_batch_size": 3, "max_seq_len": 60, "max_num_tokens": 16, **options}
    )
    engine = build_engine(open_target(target), open_drafter(drafter), config, directory)
    held = for_tensorrt(engine.config, plugins=False)  # whose tables reach to the end of its caches
    return engine.config, [load_rank(held, engine.path, rank, CPU) for rank in range(config.tp_size)]


def for_tensorrt(config: EngineConfig, *, plugins: bool) -> EngineConfig:
    """The config as a TensorRT engine of the same weights has it, of the backend with plugins or of that without."""
    return replace(config, builder=replace(config.builder, backend="tensorrt" if plugins else "tensorrt_rtx"))


def widened(pair: Pair) -> Pair:
    """The same pair in float64; what is packed stays as it is."""
    parts = ("target_weights", "drafter_weights", "target_rotary", "drafter_rotary")
    return replace(pair, **{name: _widened(getattr(pair, name)) for name in parts})


def _widened(part: Any) -> Any:
    if isinstance(part, Tensor):
        return part.double() if part.is_floating_point() else part
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{each.name: _widened(getattr(part, each.name)) for each in fields(part)})
    return tuple(_widened(each) for each in part) if type(part) is tuple else part


class TorchPasses:
    """The passes of the torch executor, of one rank that holds everything; in the type of the pair's norms."""

    def __init__(self, pair: Pair, config: EngineConfig) -> None:
        self.pair = pair
        build = config.build_config
        quantization = pair.target.quantization
        self.ops = TorchOps(quantizes_activations=quantization is not None and quantization.quantizes_activations)
        self.caches = Caches(
            *(
                [
                    LayerCache(*self._zeros(model, layer, build), layer.k_scale, layer.v_scale)
                    for layer in weights.layers
                ]
                for model, weights in ((pair.target, pair.target_weights), (pair.drafter, pair.drafter_weights))
            )
        )

    def _zeros(self, model: Any, layer: Any, build: BuildConfig) -> tuple[Tensor, Tensor]:
        shape = (build.max_batch_size, model.num_key_value_heads, build.max_seq_len + self.pair.drafter.block_size)
        dtype = layer.input_norm.dtype if layer.k_scale is None else torch.float8_e4m3fn
        return tuple(torch.zeros((*shape, model.head_dim), dtype=dtype) for _ in range(2))  # type: ignore[return-value]

    def target(self, step: Step) -> Tensor:
        """Logits [B, R, V]."""
        where = span(step.kv_len.tolist(), step.tokens.shape[1], step.slots.tolist())
        return self.pair.target_pass(self.ops, step.tokens, step.logit_rows, self.caches, where)

    def draft(self, anchors: Tensor, kv_len: Tensor, sampling: Sampling) -> Tensor:
        """Logits [B, b - 1, V] of the sequences in the first slots."""
        size = self.pair.drafter.block_size
        block = torch.full((len(anchors), size), self.pair.drafter.mask_token_id)
        block[:, 0] = anchors
        return self.pair.drafter_pass(self.ops, block, size - 1, self.caches.drafter, span(kv_len.tolist(), size))


class Recorded:
    """One engine of a rank as a network; called, an `EnginePass` of a rank that is alone."""

    def __init__(
        self, record: Any, config: EngineConfig, pairs: Sequence[Pair], rank: int = 0, *, plugins: bool = False
    ) -> None:
        self._builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        self.network = self._builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.computed: Mapping[str, Input] = {}
        config = for_tensorrt(config, plugins=plugins)
        if plugins:
            recorder = RecordedPlugins(self.network)
            self.computed = recorder.computed
            self._ops: TensorRTOps = PluginOps(trt, self.network, recorder, BLOCK, rank=rank, ranks=len(pairs))
        else:
            self._ops = TensorRTOps(trt, self.network, rank=rank, ranks=len(pairs))  # which holds the constants
        self.bindings: Bindings = record(self._ops, pairs[rank], config)
        names = {each.name for each in self.bindings.inputs}
        self.shared = {name: tensor for name, tensor in shared_of(config, pairs[rank]).items() if name in names}
        caches = {each.name.removesuffix(UPDATED) for each in self.bindings.outputs if each.name.endswith(UPDATED)}
        self.given = names - self.shared.keys() - caches
        """Inputs that every pass sets."""

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        interpret([self], [tensors])


def shared_of(config: EngineConfig, pair: Pair) -> dict[str, Tensor]:
    """The weights that both engines of a rank take as inputs."""
    held = {"embedding": pair.target_weights.embedding, "head": pair.target_weights.head.weight}
    return {each.name: held[each.name] for each in shared_weights(config, head=True)}


def interpret(recorded: Sequence[Recorded], bound: Sequence[Mapping[str, Tensor]]) -> None:
    """A pass of all ranks, whose outputs go to where they are bound."""
    inputs = [
        {**one.computed, **{each.name: tensors[each.name] for each in one.bindings.inputs}}
        for one, tensors in zip(recorded, bound, strict=True)
    ]
    outputs = NetworkInterpreter([one.network for one in recorded]).run(inputs)
    for one, tensors, computed in zip(recorded, bound, outputs, strict=True):
        assert computed.keys() == {each.name for each in one.bindings.outputs}
        for name, value in computed.items():
            assert (value.dtype, value.shape) == (tensors[name].dtype, tensors[name].shape)
            if name.endswith(UPDATED):
                assert tensors[name].data_ptr() == tensors[name.removesuffix(UPDATED)].data_ptr()
            tensors[name].copy_(value)


class NetworkPasses:
    """The same passes by recorded networks, all ranks together; `outputs` are every rank's of the last one."""

    def __init__(self, config: EngineConfig, pairs: Sequence[Pair], *, plugins: bool = False) -> None:
        self.config, self.pairs, self.plugins = config, pairs, plugins
        self.outputs: list[dict[str, Tensor]] = []
        self.caches: list[dict[Model, CacheStorage]] = [
            {
                "target": CacheStorage.allocate("target", config, CPU),
                "drafter": CacheStorage.allocate("drafter", config, CPU),
            }
            for _ in pairs
        ]
        self._target = [Recorded(record_target, config, pairs, rank, plugins=plugins) for rank in range(len(pairs))]
        self.drafters = [Recorded(record_drafter, config, pairs, rank, plugins=plugins) for rank in range(len(pairs))]

    def target(self, step: Step) -> Tensor:
        """See `TorchPasses.target`."""
        sizes = {"batch": step.tokens.shape[0], "rows": step.tokens.shape[1], "choices": step.logit_rows.shape[1]}
        values = {"tokens": step.tokens, "kv_len": step.kv_len, "q_len": step.q_len, "logit_rows": step.logit_rows}
        if self.plugins:
            values |= {"draft_len": step.draft_len, "slots": step.slots, **_noise(step.sampling)}
        self._run(self._target, sizes, int(step.slots[0]), values)
        return self._logits()

    def draft(self, anchors: Tensor, kv_len: Tensor, sampling: Sampling) -> Tensor:
        """See `TorchPasses.draft`."""
        values = {"anchors": anchors, "kv_len": kv_len}
        if self.plugins:
            values |= {"slots": torch.arange(len(anchors)), **_noise(sampling)}
        self._run(self.drafters, {"batch": len(anchors)}, 0, values)
        if self.config.speculative_config.has_reduced_vocabulary:
            assert all(torch.equal(each["logits"], self.outputs[0]["logits"]) for each in self.outputs)
            return self.outputs[0]["logits"].clone()
        return self._logits()

    def cache(self, model: Model) -> CacheStorage:
        """All heads, of every rank once."""
        of = self.config.pretrained_config if model == "target" else self.config.speculative_config
        repeats = max(1, len(self.pairs) // of.num_key_value_heads)
        parts = [caches[model] for caches in self.caches[::repeats]]
        return CacheStorage(*(torch.cat([getattr(part, kind) for part in parts], 2) for kind in ("keys", "values")))

    def _run(self, recorded: Sequence[Recorded], sizes: Any, slot: int, values: Mapping[str, Tensor]) -> None:
        self.outputs = [
            EngineIO(each.bindings, caches, each.shared, CPU).bind(sizes, slot)
            for each, caches in zip(recorded, self.caches, strict=True)
        ]
        for each, tensors in zip(recorded, self.outputs, strict=True):
            assert values.keys() == each.given
            for name, value in values.items():
                tensors[name].copy_(value)
        interpret(recorded, self.outputs)

    def _logits(self) -> Tensor:
        joined = torch.cat([each["logits"] for each in self.outputs], -1)
        return joined[..., : self.config.pretrained_config.vocab_size]


def _noise(sampling: Sampling) -> dict[str, Tensor]:
    return {"temperature": sampling.temperature, "seeds": sampling.seeds}
