"""A TensorRT network evaluated layer by layer in torch, all ranks of it together.

The truth that a network is held to where no GPU is. It follows TensorRT's documentation and shares no code with what
writes networks. Layers compute in float64 and round once, to the type that the network declares: an ideal strongly
typed engine. Every tensor's type and shape is checked against what TensorRT says of it.

    interpreter = NetworkInterpreter([network_of_rank_0, network_of_rank_1])
    outputs = interpreter.run([inputs_of_rank_0, inputs_of_rank_1])

What TensorRT's bindings cannot tell of a collective is noted in the layer's metadata when it is added, so this module
must be imported before the networks are built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import tensorrt_rtx as trt
import torch
from torch import Tensor

from tests.network_arithmetic import ARITHMETIC_LAYERS
from tests.network_formats import NetworkFault, rounded, torch_type
from tests.network_movement import MOVEMENT_LAYERS
from tests.network_transformers import TRANSFORMER_LAYERS

Evaluate = Callable[[trt.ITensor], Tensor]
Input = Tensor | Callable[[Evaluate], Tensor]
Node = tuple[int, trt.ITensor]
"""A tensor of a rank's network."""

LAYERS = MOVEMENT_LAYERS | ARITHMETIC_LAYERS | TRANSFORMER_LAYERS

_CLASSES: dict[trt.LayerType, type] = {
    getattr(trt.LayerType, name): getattr(trt, f"I{name.replace('_', ' ').title().replace(' ', '')}Layer", trt.ILayer)
    for name in trt.LayerType.__members__
} | {
    trt.LayerType.ELEMENTWISE: trt.IElementWiseLayer,
    trt.LayerType.EINSUM: trt.IEinsumLayer,
    trt.LayerType.KV_CACHE_UPDATE: trt.IKVCacheUpdateLayer,
    trt.LayerType.SOFTMAX: trt.ISoftMaxLayer,
    trt.LayerType.TOPK: trt.ITopKLayer,
}


def kind_of(layer: trt.ILayer) -> trt.LayerType:
    """A concrete layer's own `type` may be something else: an activation's is its function."""
    return trt.ILayer.type.fget(layer)


def _noting(add: Callable[..., trt.IDistCollectiveLayer]) -> Callable[..., trt.IDistCollectiveLayer]:
    @wraps(add)
    def add_dist_collective(
        network: trt.INetworkDefinition,
        input: trt.ITensor,
        dist_collective_op: trt.CollectiveOperation,
        reduce_op: trt.ReduceOperation,
        root: int,
        groups: Sequence[int] | None,
    ) -> trt.IDistCollectiveLayer:
        layer = add(network, input, dist_collective_op, reduce_op, root, groups)
        if layer is not None:
            ranks = [] if groups is None else [int(rank) for rank in groups]
            layer.metadata = json.dumps([dist_collective_op.name, reduce_op.name, int(root), ranks])
        return layer

    return add_dist_collective


trt.INetworkDefinition.add_dist_collective = _noting(trt.INetworkDefinition.add_dist_collective)


class NetworkInterpreter:
    """Networks that run together, one a rank, evaluated on demand.

    Raises `NetworkFault` where the ranks' networks do not meet, here and in `run`.
    """

    def __init__(self, networks: Sequence[trt.INetworkDefinition]) -> None:
        self.networks = list(networks)
        self.inputs: list[dict[str, trt.ITensor]] = []
        self.outputs: list[dict[str, trt.ITensor]] = []
        self.producers: dict[Node, trt.ILayer] = {}
        self.collectives: list[list[trt.ILayer]] = []
        for rank, network in enumerate(self.networks):
            self._read(rank, network)
        if len({len(layers) for layers in self.collectives}) > 1:
            counts = [len(layers) for layers in self.collectives]
            raise NetworkFault(f"the ranks have {counts} collectives: they would wait for each other for ever")

    def _read(self, rank: int, network: trt.INetworkDefinition) -> None:
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        outputs = [network.get_output(index) for index in range(network.num_outputs)]
        self.inputs.append({tensor.name: tensor for tensor in inputs})
        self.outputs.append({tensor.name: tensor for tensor in outputs})
        self.collectives.append([])
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            layer.__class__ = _CLASSES[kind_of(layer)]
            if kind_of(layer) == trt.LayerType.DIST_COLLECTIVE:
                self.collectives[rank].append(layer)
            for output in range(layer.num_outputs):
                self.producers[rank, layer.get_output(output)] = layer

    def run(
        self, inputs: Sequence[Mapping[str, Input]], outputs: Sequence[str] | None = None
    ) -> list[dict[str, Tensor]]:
        """Every rank's outputs by name: those asked for, or all. Only what they need is evaluated, each tensor once.

        `inputs` has one mapping a rank. A value may be a function that is given `evaluate` and returns the tensor:
        what an operation computes that this network cannot hold, from other tensors of the same rank.
        """
        if len(inputs) != len(self.networks):
            raise NetworkFault(f"{len(inputs)} mappings of inputs for {len(self.networks)} ranks")
        for given, known in zip(inputs, self.inputs, strict=True):
            if unknown := sorted(given.keys() - known.keys()):
                raise NetworkFault(f"no input is named {unknown}; inputs: {sorted(known)}")
        names = list(self.outputs[0]) if outputs is None else list(outputs)
        for known in self.outputs:
            if missing := [name for name in names if name not in known]:
                raise NetworkFault(f"no output is named {missing}; outputs: {sorted(known)}")
        evaluation = _Evaluation(self, inputs)
        nodes = [(rank, known[name]) for rank, known in enumerate(self.outputs) for name in names]
        evaluation.evaluate(nodes)
        return [
            {name: evaluation.values[rank, known[name]] for name in names} for rank, known in enumerate(self.outputs)
        ]


class _Evaluation:
    """One run: the values that are known so far."""

    def __init__(self, interpreter: NetworkInterpreter, inputs: Sequence[Mapping[str, Input]]) -> None:
        self.interpreter = interpreter
        self.inputs = inputs
        self.values: dict[Node, Tensor] = {}
        self.computing: set[Node] = set()

    def evaluate(self, nodes: Sequence[Node]) -> None:
        """An explicit stack: networks are deeper than Python's."""
        stack = list(nodes)
        while stack:
            node = stack[-1]
            if node in self.values:
                stack.pop()
                continue
            if missing := [needed for needed in self._needed(node) if needed not in self.values]:
                stack += missing
                continue
            self._compute(node)

    def _needed(self, node: Node) -> list[Node]:
        rank, _ = node
        layer = self.interpreter.producers.get(node)
        if layer is None:
            return []
        if kind_of(layer) == trt.LayerType.DIST_COLLECTIVE:
            return [(rank, layer.get_input(0)) for rank, layer in enumerate(self._partners(rank, layer))]
        return [(rank, tensor) for tensor in inputs_of(layer) if tensor is not None]

    def _partners(self, rank: int, layer: trt.ILayer) -> list[trt.ILayer]:
        order = self.interpreter.collectives[rank].index(layer)
        return [layers[order] for layers in self.interpreter.collectives]

    def _compute(self, node: Node) -> None:
        rank, tensor = node
        layer = self.interpreter.producers.get(node)
        if layer is None:
            self.values[node] = self._input(rank, tensor)
        elif kind_of(layer) == trt.LayerType.DIST_COLLECTIVE:
            self._meet(self._partners(rank, layer))
        else:
            arguments = [None if each is None else self.values[rank, each] for each in inputs_of(layer)]
            self._store(rank, layer, _applied(layer, arguments))

    def _store(self, rank: int, layer: trt.ILayer, results: Sequence[Tensor]) -> None:
        where = described(layer)
        if len(results) != layer.num_outputs:
            raise NetworkFault(f"{where}: {len(results)} results for {layer.num_outputs} outputs")
        for index, result in enumerate(results):
            tensor = layer.get_output(index)
            self.values[rank, tensor] = checked(_as_declared(result, tensor, where), tensor, where)

    def _input(self, rank: int, tensor: trt.ITensor) -> Tensor:
        where = f"input {tensor.name} of rank {rank}"
        if not tensor.is_network_input or tensor.name not in self.inputs[rank]:
            raise NetworkFault(f"{where}: no value was given")
        value = self.inputs[rank][tensor.name]
        if not isinstance(value, Tensor):
            if (rank, tensor) in self.computing:
                raise NetworkFault(f"{where}: its function needs its own result")
            self.computing.add((rank, tensor))
            value = value(lambda other: self._now(rank, other))
        return checked(value, tensor, where)

    def _now(self, rank: int, tensor: trt.ITensor) -> Tensor:
        self.evaluate([(rank, tensor)])
        return self.values[rank, tensor]

    def _meet(self, layers: Sequence[trt.ILayer]) -> None:
        parts = [self.values[rank, layer.get_input(0)] for rank, layer in enumerate(layers)]
        for rank, result in enumerate(_exchanged(layers, parts)):
            self._store(rank, layers[rank], [result])


def inputs_of(layer: trt.ILayer) -> list[trt.ITensor | None]:
    """What a layer reads. An attention's output boundary stands for all of it, from query to lengths."""
    if kind_of(layer) != trt.LayerType.ATTENTION_OUTPUT:
        return [layer.get_input(index) for index in range(layer.num_inputs)]
    attention = layer.attention
    tensors = [attention.get_input(index) for index in range(3)]
    return [*tensors, attention.mask, attention.key_value_lengths]


def described(layer: trt.ILayer) -> str:
    return f"layer {layer.name} ({kind_of(layer).name})"


def _applied(layer: trt.ILayer, arguments: list[Tensor | None]) -> Sequence[Tensor]:
    where = described(layer)
    if kind_of(layer) not in LAYERS:
        raise NetworkFault(f"{where}: no meaning is known for this type of layer")
    try:
        results = LAYERS[kind_of(layer)](layer, *arguments)
    except (NetworkFault, RuntimeError, LookupError, TypeError, ValueError) as error:
        shapes = [None if each is None else f"{list(each.shape)} {each.dtype}" for each in arguments]
        raise NetworkFault(f"{where}: {error}; inputs: {shapes}") from error
    return [results] if isinstance(results, Tensor) else results


def _as_declared(result: Tensor, tensor: trt.ITensor, where: str) -> Tensor:
    """float64 is what a layer computes in; anything else must already be of the declared type."""
    if result.dtype != torch.float64:
        return result
    if tensor.dtype not in (trt.float32, trt.float16, trt.bfloat16):
        raise NetworkFault(f"{where}: computes real numbers, but TensorRT says {tensor.dtype.name}")
    return rounded(result, torch_type(tensor.dtype))


def checked(value: Tensor, tensor: trt.ITensor, where: str) -> Tensor:
    """`value` if it is what TensorRT says of `tensor`: its type, and every dimension that is known."""
    if value.dtype != torch_type(tensor.dtype):
        raise NetworkFault(f"{where}: is {value.dtype}, but TensorRT says {tensor.dtype.name}")
    try:
        declared = tuple(tensor.shape)
    except RuntimeError as error:
        raise NetworkFault(f"{where}: TensorRT refuses this layer or one before it; its log says why") from error
    same = len(declared) == value.ndim and all(d in (-1, n) for d, n in zip(declared, value.shape, strict=True))
    if not same:
        raise NetworkFault(f"{where}: is of shape {list(value.shape)}, but TensorRT says {list(declared)}")
    return value


def _exchanged(layers: Sequence[trt.ILayer], parts: list[Tensor]) -> list[Tensor]:
    where, ranks = described(layers[0]), len(layers)
    notes: list[list[Any]] = []
    for layer in layers:
        if layer.num_ranks != ranks:
            raise NetworkFault(f"{described(layer)}: num_ranks is {layer.num_ranks}, but {ranks} ranks run together")
        try:
            notes.append(json.loads(layer.metadata))
        except ValueError as error:
            raise NetworkFault(f"{where}: its metadata no longer says what it does, or never did") from error
    if any(note != notes[0] for note in notes):
        raise NetworkFault(f"{where}: the ranks do different things: {notes}")
    operation, reduction, _, groups = notes[0]
    if groups and sorted(groups) != list(range(ranks)):
        raise NetworkFault(f"{where}: groups {groups} of {ranks} ranks are not known here")
    if operation == "ALL_GATHER":
        return [torch.cat(parts)] * ranks
    if operation == "ALL_REDUCE" and reduction in _REDUCTIONS:
        return [_REDUCTIONS[reduction](torch.stack([part.double() for part in parts]))] * ranks
    raise NetworkFault(f"{where}: no meaning is known for {operation} {reduction}")


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda parts: parts.sum(0),
    "PROD": lambda parts: parts.prod(0),
    "MAX": lambda parts: parts.amax(0),
    "MIN": lambda parts: parts.amin(0),
    "AVG": lambda parts: parts.mean(0),
}
