"""The operations as TensorRT knows them: `dflash::verify_partial` and the others, compiled ahead of time.

TensorRT keeps the PTX in the engine: which Triton compiled it does not matter to whoever runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dflash_trt.errors import UserError
from dflash_trt.plugins.gpus import AHEAD_OF_TIME_SHARED
from dflash_trt.plugins.operation import Attributes, Operation, Shapes, Types
from dflash_trt.plugins.operations import OPERATIONS

NAMESPACE = "dflash"

_DATA_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "FP8",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
_TORCH_TYPES = {name: dtype for dtype, name in _DATA_TYPES.items()}


def registered() -> Any:
    """TensorRT's namespace of the operations, `tensorrt.plugin.op.dflash`; the first call registers them.

    Each takes its input tensors in order, then all of its attributes by name and in order, `compute_capability` last,
    and gives what `network.add_plugin(..., aot=True)` takes.
    """
    import tensorrt.plugin as trtp

    for operation in OPERATIONS:
        if not hasattr(getattr(trtp.op, NAMESPACE, None), operation.name):
            register(trtp, operation)
    return getattr(trtp.op, NAMESPACE)


def register(trtp: Any, operation: Operation) -> None:
    """Register one operation with `tensorrt.plugin`, which looks at signatures: they are made from the declaration.

    It takes tensors of the types that a network gives it, and linear, as TensorRT has it where nothing else is said.
    """
    plugin_id = f"{NAMESPACE}::{operation.name}"
    attributes = {**operation.attributes, "compute_capability": int}
    taken = {**dict.fromkeys(operation.inputs, trtp.TensorDesc), **attributes}
    descriptors = tuple.__class_getitem__((trtp.TensorDesc,) * len(operation.outputs))
    implementation = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]

    def describe(*values: Any, **named: Any) -> Any:
        inputs = dict(zip(taken, values, strict=False))
        return _describe(trtp, operation, inputs, named)

    def implement(*values: Any) -> Any:
        named = dict(zip(taken, values, strict=False))
        return _implement(trtp, operation, {name: named.pop(name) for name in operation.inputs}, named)

    trtp.register(plugin_id)(_signed(describe, taken, descriptors))
    trtp.aot_impl(plugin_id)(_signed(implement, {**taken, "outputs": descriptors, "tactic": int}, implementation))


def _signed(function: Callable[..., Any], parameters: dict[str, Any], returns: Any) -> Callable[..., Any]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = inspect.Signature(signature, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def _describe(trtp: Any, operation: Operation, inputs: dict[str, Any], attributes: Attributes) -> tuple[Any, ...]:
    outputs = operation.describe(_expressions(inputs), _types(inputs), attributes)
    return tuple(
        trtp.from_shape_expr(outputs[name].shape, _data_type(outputs[name].dtype)) for name in operation.outputs
    )


def _implement(
    trtp: Any, operation: Operation, inputs: dict[str, Any], attributes: Attributes
) -> tuple[str, str, Any, Any]:
    numbers = {name: tuple(desc.shape) for name, desc in inputs.items()}
    kernel = operation.kernel(numbers, _types(inputs), attributes)
    compiled = kernel.compile(attributes["compute_capability"])
    if compiled.shared > AHEAD_OF_TIME_SHARED:
        types = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in _types(inputs).values()}))
        raise UserError(
            f"{operation.name} of {types} takes {compiled.shared} bytes of shared memory for"
            f" sm{attributes['compute_capability']}, TensorRT gives {AHEAD_OF_TIME_SHARED}; bfloat16 and heads of up to"
            " 128 take no more"
        )
    sizes = operation.arguments(kernel, _expressions(inputs), _types(inputs), attributes)
    params = trtp.KernelLaunchParams()
    params.grid_x, params.grid_y, params.grid_z = kernel.grid(sizes)
    params.block_x = compiled.threads
    params.shared_mem = compiled.shared
    arguments = trtp.SymIntExprs(len(sizes))
    for index, size in enumerate(sizes.values()):
        arguments[index] = trtp.SymInt32(size)
    return compiled.name, compiled.ptx, params, arguments


def _expressions(inputs: dict[str, Any]) -> Shapes:
    return {name: tuple(desc.shape_expr) for name, desc in inputs.items()}


def _types(inputs: dict[str, Any]) -> Types:
    return {name: _TORCH_TYPES[desc.dtype.name] for name, desc in inputs.items()}


def _data_type(dtype: torch.dtype) -> Any:
    import tensorrt

    return getattr(tensorrt.DataType, _DATA_TYPES[dtype])
