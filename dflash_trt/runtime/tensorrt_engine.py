"""One engine on a GPU: deserialized, bound by address, enqueued, and captured where a pass comes again."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engine.bindings import Bindings
from dflash_trt.engine.tensorrt_api import TensorRT
from dflash_trt.errors import UserError

_CAPTURED = ("decode",)
"""Profiles whose passes repeat in few shapes; prompt chunks come in too many."""


class TensorRTEngine:
    """An `EnginePass` over a plan.

    Passes run on a stream of their own, in order with the caller's. Of a profile that decodes, the second pass of a
    shape is captured as a CUDA graph and replayed from then on: it must be given the same addresses.

    Args:
        tensorrt: what built the plan.
        plan: the serialized engine, mapped; not used after this returns.
        name: of its file, for messages.
        bindings: its table.
        device: a CUDA device.
        communicator: address of the `ncclComm_t` of its ranks; None where it is alone.
    """

    def __init__(
        self,
        tensorrt: TensorRT,
        plan: mmap,
        name: str,
        bindings: Bindings,
        device: torch.device,
        communicator: int | None = None,
    ) -> None:
        torch.cuda.set_device(device)
        self._name = name
        self._runtime = tensorrt.trt.Runtime(tensorrt.logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise UserError(f"{name}: {tensorrt.name} cannot read it: {tensorrt.logger.last_error}; build it again")
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._contexts = {profile: self._context(index) for index, profile in enumerate(bindings.profiles)}
        if communicator is not None:
            for context in self._contexts.values():
                context.set_communicator(_capsule(communicator))
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph | None] = {}

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        """See `EnginePass`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if profile in _CAPTURED:
            self._replay(profile, tensors)
        else:
            self._enqueue(profile, tensors)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _replay(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        key = (profile, *((tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors.values()))
        if key not in self._graphs:
            self._graphs[key] = None
            self._enqueue(profile, tensors)  # a context allocates on its first pass of a shape
            return
        graph = self._graphs[key]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._enqueue(profile, tensors)
            self._graphs[key] = graph
        with torch.cuda.stream(self._stream):
            graph.replay()

    def _enqueue(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        context = self._contexts[profile]
        for name, tensor in tensors.items():
            if self._engine.get_tensor_mode(name).name == "INPUT":
                context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise RuntimeError(f"{self._name}: a pass under profile {profile} failed")

    def _context(self, index: int) -> Any:
        context = self._engine.create_execution_context()
        context.set_optimization_profile_async(index, self._stream.cuda_stream)
        return context


def _capsule(address: int) -> Any:
    """How TensorRT's binding takes a pointer."""
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return create(address, None, None)
