"""One engine on a GPU: deserialized, bound by address, enqueued, and captured where a pass comes again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engine.bindings import Bindings
from dflash_trt.engine.tensorrt_api import TensorRT
from dflash_trt.errors import UserError
from dflash_trt.runtime.replay import Replays

_REPLAYED = "decode"
"""The profile whose passes repeat in few shapes; prompt chunks come in too many."""
_MOST_REPLAYS = 64
"""Graphs that are kept, each with some megabytes of its own; more shapes than this are run as they are."""


class TensorRTEngine:
    """An `EnginePass` over a plan.

    Passes run on a stream of their own, in order with the caller's. Those that decode are captured as CUDA graphs.

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
        tensorrt.logger.errors.clear()
        self._tensorrt = tensorrt
        self._name = name
        self._runtime = tensorrt.trt.Runtime(tensorrt.logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        self._require(self._engine, "it cannot be read")
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._contexts = {profile: self._context(index) for index, profile in enumerate(bindings.profiles)}
        if communicator is not None:
            for context in self._contexts.values():
                self._require(context.set_communicator(_capsule(communicator)), "it does not take the communicator")
        self._replays = Replays(lambda tensors: self._enqueue(_REPLAYED, tensors), self._captured, _MOST_REPLAYS)

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        """See `EnginePass`."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        if profile == _REPLAYED:
            self._replays(tensors)
        else:
            self._enqueue(profile, tensors)
        current.wait_stream(self._stream)

    def _captured(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._enqueue(_REPLAYED, tensors)

        def replay() -> None:
            with torch.cuda.stream(self._stream):
                graph.replay()

        return replay

    def _enqueue(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        context = self._contexts[profile]
        for name, tensor in tensors.items():
            if self._engine.get_tensor_mode(name).name == "INPUT":
                shape = tuple(tensor.shape)
                self._require(context.set_input_shape(name, shape), f"{name} cannot be {shape} under {profile}")
            self._require(context.set_tensor_address(name, tensor.data_ptr()), f"{name} cannot be bound")
        self._require(context.execute_async_v3(self._stream.cuda_stream), f"a pass under {profile} failed")

    def _context(self, index: int) -> Any:
        context = self._engine.create_execution_context()
        self._require(context, "there is no memory to run it")
        chosen = context.set_optimization_profile_async(index, self._stream.cuda_stream)
        self._require(chosen, f"it has no profile {index}")
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
