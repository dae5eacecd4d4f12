"""The plugin's operations in networks that cannot hold them: placeholders, computed by the plugin's torch references.

An operation's outputs become inputs of the network, whose values the interpreter asks for when it needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorrt_rtx as trt
import torch
from torch import Tensor

from dflash_trt.plugins.block_attention import block_attention_reference
from dflash_trt.plugins.kernel import pointer
from dflash_trt.plugins.kv_write import kv_write_reference
from dflash_trt.plugins.operations import OPERATIONS
from dflash_trt.plugins.verify import verify_combine_reference, verify_partial_reference
from tests.network_formats import torch_type
from tests.network_interpreter import Evaluate, Input

BLOCK = 4
"""Size of the drafters' blocks."""
CHUNK = 32
"""Tokens of which one stays in a partial choice; small, so that vocabularies of tests have several."""
Shape = tuple[int, ...]
Outputs = list[tuple[Any, Shape]]


class RecordedPlugins:
    """An `AddPlugin` of one network; `computed` says what its placeholders hold."""

    def __init__(self, network: trt.INetworkDefinition) -> None:
        self.computed: dict[str, Input] = {}
        self._network = network

    def __call__(self, name: str, inputs: Sequence[trt.ITensor], **attributes: Any) -> list[trt.ITensor]:
        outputs, compute = COMPUTED[name]
        declared = outputs(inputs)
        _check(name, inputs, attributes, declared)
        added = [self._placeholder(name, *output) for output in declared]
        for index, tensor in enumerate(added):
            self.computed[tensor.name] = _deferred(compute, inputs, attributes, index)
        # An input cannot be an output of the network too.
        return [self._network.add_identity(tensor).get_output(0) for tensor in added]

    def _placeholder(self, name: str, dtype: Any, shape: Shape) -> trt.ITensor:
        return self._network.add_input(f"{name} {len(self.computed)} {self._network.num_inputs}", dtype, shape)


def _deferred(
    compute: Callable[..., Sequence[Tensor]], inputs: Sequence[trt.ITensor], attributes: dict[str, Any], index: int
) -> Input:
    def evaluated(evaluate: Evaluate) -> Tensor:
        return compute(*(evaluate(tensor) for tensor in inputs), **attributes)[index]

    return evaluated


def _kv_write(*inputs: Tensor, eps: float, has_norm: bool) -> Sequence[Tensor]:
    keys, values, k_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache = inputs
    caches = k_cache.clone(), v_cache.clone()
    scales = (k_scale, v_scale) if k_cache.dtype == torch.float8_e4m3fn else (None, None)
    norm = k_norm if has_norm else None
    kv_write_reference(keys, values, norm, cos, sin, kv_len, q_len, slots, *scales, *caches, eps)
    return caches


def _attention(
    *inputs: Tensor, eps: float, has_norm: bool, causal: bool, window: int, ratio: int, most_rows: int
) -> Sequence[Tensor]:
    """Of every head of every row one part, which is the whole."""
    assert most_rows == BLOCK and ratio * inputs[9].shape[2] == inputs[0].shape[2]
    q, q_norm, cos, sin, kv_len, q_len, slots, k_scale, v_scale, k_cache, v_cache = inputs
    scales = (k_scale, v_scale) if k_cache.dtype == torch.float8_e4m3fn else (None, None)
    norm = q_norm if has_norm else None
    whole = block_attention_reference(
        *(q, norm, cos, sin, kv_len, q_len, slots, *scales, k_cache[0], v_cache[0], None),
        causal=causal,
        window=window,
        eps=eps,
    )
    return whole.float().flatten(0, 2)[:, None], torch.zeros(whole.shape[:3].numel(), 1)


def _attention_combine(
    partial: Tensor, lse: Tensor, sinks: Tensor, like: Tensor, *, has_sinks: bool, ratio: int, most_rows: int
) -> Sequence[Tensor]:
    assert not has_sinks and not sinks.any() and not lse.any()
    assert most_rows == BLOCK and like.shape[2] % ratio == 0
    return [partial.view(like.shape).to(like.dtype)]


def _verify_partial(*inputs: Tensor) -> Sequence[Tensor]:
    return verify_partial_reference(*inputs, chunk=CHUNK)


def _parts(logits: trt.ITensor) -> Outputs:
    shape = (*logits.shape[:2], -(-logits.shape[2] // CHUNK))
    return [(trt.float32, shape), (trt.int32, shape)]


def _check(name: str, inputs: Sequence[trt.ITensor], attributes: dict[str, Any], outputs: Outputs) -> None:
    """The network gives an operation what it is registered to take, and there is a kernel for that."""
    [operation] = [each for each in OPERATIONS if each.name == name]
    tensors = dict(zip(operation.inputs, inputs, strict=True))
    assert {key: type(value) for key, value in attributes.items()} == dict(operation.attributes)
    types = {key: torch_type(tensor.dtype) for key, tensor in tensors.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    configured = {**attributes, "compute_capability": 103}
    kernel = operation.kernel(shapes, types, configured)
    for key, dtype in types.items():
        declared = kernel.parameters[key]
        assert declared == pointer(dtype) or (declared == "*u8" and dtype == torch.float8_e4m3fn)
    some = {key: tuple(5 if size < 0 else size for size in shape) for key, shape in shapes.items()}
    described = operation.describe(some, types, configured)
    assert len(described) == len(operation.outputs) == len(outputs)
    for key, (dtype, shape) in zip(operation.outputs, outputs, strict=True):
        output = described[key]
        assert torch_type(dtype) == output.dtype
        assert len(shape) == len(output.shape)


COMPUTED: dict[str, tuple[Callable[[Sequence[trt.ITensor]], Outputs], Callable[..., Sequence[Tensor]]]] = {
    "kv_write": (lambda given: [(each.dtype, tuple(each.shape)) for each in given[10:]], _kv_write),
    "block_attention_partial": (
        lambda given: [(trt.float32, (-1, -1, given[0].shape[3])), (trt.float32, (-1, -1))],
        _attention,
    ),
    "block_attention_combine": (lambda given: [(given[3].dtype, tuple(given[3].shape))], _attention_combine),
    "verify_partial": (lambda given: _parts(given[0]), _verify_partial),
    "verify_combine": (
        lambda given: [
            (trt.int32, tuple(given[2].shape)),
            *[(trt.int32, tuple(given[3].shape))] * 2,
        ],
        verify_combine_reference,
    ),
}
