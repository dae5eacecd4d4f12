"""One engine on a GPU: deserialized, bound by address, enqueued, and captured where a pass comes again."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engine.bindings import Bindings
from dflash_trt.engine.tensorrt_api import TensorRT
from dflash_trt.errors import UserError
from dflash_trt.runtime.replay import Replays

_LOG = logging.getLogger(__name__)
_REPLAYED = "decode"
"""The profile whose passes repeat in few shapes; prompt chunks come in too many."""
_MOST_REPLAYS = 64
"""Graphs that are kept, each with some megabytes of its own."""


class TensorRTEngine:
    """An `EnginePass` over a plan.

    Passes run on a stream of their own, in order with the caller's, and one at a time: contexts share one block of
    memory for activations. With `tensorrt`, passes that decode are captured as CUDA graphs, each with a context of its
    own, since replaying one that another shape has changed since is undefined. TensorRT-RTX does that itself.

    Args:
        tensorrt: what built the plan.
        plan: the serialized engine, mapped; not used after this returns.
        name: of its file, for messages.
        bindings: its table.
        device: a CUDA device.
        communicator: address of the `ncclComm_t` of its ranks; None where it is alone.

    Raises:
        UserError: TensorRT cannot read it, or has no memory to run it.
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
        tensorrt.logger.errors.clear()
        self._tensorrt = tensorrt
        self._name = name
        self._device = device
        self._communicator = communicator
        self._profiles = list(bindings.profiles)
        with torch.cuda.device(device):
            self._runtime = tensorrt.trt.Runtime(tensorrt.logger)
            self._engine = self._runtime.deserialize_cuda_engine(plan)
            self._require(self._engine, "it cannot be read")
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            size = int(self._engine.device_memory_size_v2)
            self._activations = torch.empty(size, dtype=torch.uint8, device=device)
            self._contexts = {profile: self._context(profile) for profile in self._profiles}
        self._replays = Replays(self._run_replayed, self._captured, _MOST_REPLAYS)

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        """See `EnginePass`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            if profile == _REPLAYED and self._tensorrt.name == "tensorrt":
                self._replays(tensors)
            else:
                self._enqueue(self._contexts[profile], tensors)
            current.wait_stream(self._stream)

    def _run_replayed(self, tensors: Mapping[str, Tensor]) -> None:
        self._enqueue(self._contexts[_REPLAYED], tensors)

    def _captured(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        context, graph = self._context(_REPLAYED), torch.cuda.CUDAGraph()
        self._enqueue(context, tensors)  # which sets up what must not be set up in a capture
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                self._execute(context)
        except (RuntimeError, UserError) as failure:
            _LOG.warning("%s: a pass cannot be captured and is run each time: %s", self._name, failure)
            return lambda: self._enqueue(context, tensors)

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()
            assert context is not None  # it lives as long as its graph

        return replay

    def _enqueue(self, context: Any, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._engine.get_tensor_mode(name).name == "INPUT":
                shape = tuple(tensor.shape)
                self._require(context.set_input_shape(name, shape), f"{name} cannot be of shape {shape}")
            self._require(context.set_tensor_address(name, tensor.data_ptr()), f"{name} cannot be bound")
        self._execute(context)

    def _execute(self, context: Any) -> None:
        self._require(context.execute_async_v3(self._stream.cuda_stream), "a pass failed")

    def _context(self, profile: str) -> Any:
        """A context of a profile, on the memory that all share."""
        trt = self._tensorrt.trt
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._tensorrt.name == "tensorrt_rtx":
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(strategy)
        self._require(context, "there is no memory to run it")
        context.set_device_memory(self._activations.data_ptr(), self._activations.numel())
        index = self._profiles.index(profile)
        chosen = context.set_optimization_profile_async(index, self._stream.cuda_stream)
        self._require(chosen, f"it has no profile {profile}")
        if self._communicator is not None:
            self._require(context.set_communicator(_capsule(self._communicator)), "it does not take the communicator")
        return context

    def _require(self, result: object, otherwise: str) -> None:
        """TensorRT returns None or False where it fails, and says why to its logger."""
        if result is None or result is False:
            name, version = self._tensorrt.name, self._tensorrt.version
            raise UserError(f"{self._name}: {otherwise}; {name} {version} says: {self._tensorrt.logger.last_error}")


def _capsule(address: int) -> Any:
    """How TensorRT's binding takes a pointer."""
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return create(address, None, None)
