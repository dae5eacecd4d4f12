"""One network made into a plan, which is what TensorRT calls a serialized engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.regular_file import read_file
from dflash_trt.engine.bindings import Binding, Bindings, Profile
from dflash_trt.engine.config import EngineConfig
from dflash_trt.engine.phases import OnProgress, Phases, phase_monitor
from dflash_trt.engine.tensorrt_api import TensorRT
from dflash_trt.errors import UserError
from dflash_trt.models.pair import Pair
from dflash_trt.ops.tensorrt_layers import NetworkTensor
from dflash_trt.ops.tensorrt_ops import TensorRTOps
from dflash_trt.ops.tensorrt_plugin_ops import AddPlugin, PluginOps

Record = Callable[[TensorRTOps, Pair, EngineConfig], Bindings]
"""`record_target` or `record_drafter`."""


class TimingCache:
    """What a builder has measured of its kernels, kept from one engine to the next.

    Args:
        source: a file of another build, or None.
    """

    def __init__(self, source: Path | None = None) -> None:
        self.content = b"" if source is None else read_file(source)


def build_plan(
    tensorrt: TensorRT,
    record: Record,
    pair: Pair,
    config: EngineConfig,
    rank: int,
    write: Callable[[bytes], None],
    timing: TimingCache | None = None,
    on_progress: OnProgress = lambda phase, done: None,
) -> None:
    """Record a pass of a rank and build it for the compute capability of `config.builder`.

    Args:
        pair: the rank's part, on the CPU.
        write: given the plan piece by piece, so that it is never held whole beside what it is made of.
        timing: of a builder that measures; what it holds afterwards is what was measured, too.

    Raises:
        UserError: TensorRT refuses the network; its first error is named. What `write` raises is raised.
    """
    trt, errors = tensorrt.trt, tensorrt.logger.errors
    errors.clear()
    builder = trt.Builder(tensorrt.logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    on_progress("recording", 0.0)
    ops = _ops(tensorrt, network, config, rank)
    bindings = record(ops, pair, config)
    options = builder.create_builder_config()
    options.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32; it is on by default
    for profile in bindings.profiles.values():
        options.add_optimization_profile(_profile(builder, bindings, profile))
    if not config.builder.uses_plugins:  # the other builds for the GPU it runs on
        options.num_compute_capabilities = 1
        options.set_compute_capability(getattr(trt.ComputeCapability, f"SM{config.builder.gpu}"), 0)
    if timing is not None:
        cache = options.create_timing_cache(timing.content)
        options.set_timing_cache(cache, False)
    monitor = phase_monitor(trt, Phases(on_progress))
    options.progress_monitor = monitor
    writer = _writer(trt, write)
    built = builder.build_serialized_network_to_stream(network, options, writer)
    if writer.failure is not None:  # which TensorRT may take for success
        raise writer.failure
    if not built:
        why = errors[0] if errors else "it does not say why"
        raise UserError(
            f"{tensorrt.name} {tensorrt.version} cannot build this network for {config.builder.compute_capability}, "
            f"it says: {why}"
        )
    if timing is not None:
        timing.content = bytes(memoryview(options.get_timing_cache().serialize()))


def _writer(trt: Any, write: Callable[[bytes], None]) -> Any:
    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.failure: Exception | None = None

        def write(self, piece: bytes) -> int:
            """TensorRT's callback: how much of a piece was taken."""
            if self.failure is not None:
                return 0
            try:
                write(piece)
            except Exception as error:  # which TensorRT would not let through
                self.failure = error
                return 0
            return len(piece)

    return Writer()


def _ops(tensorrt: TensorRT, network: Any, config: EngineConfig, rank: int) -> TensorRTOps:
    ranks = config.build_config.tp_size
    if not config.builder.uses_plugins:
        return TensorRTOps(tensorrt.trt, network, rank=rank, ranks=ranks)
    add_plugin = plugin_adder(network, config.builder.gpu)
    block_size = config.speculative_config.block_size
    return PluginOps(tensorrt.trt, network, add_plugin, block_size, rank=rank, ranks=ranks)


def plugin_adder(network: Any, compute_capability: int) -> AddPlugin:
    """What adds the plugin's operations to a network, their kernels compiled for a GPU."""
    from dflash_trt.plugins.registration import registered

    operations = registered()

    def add(name: str, inputs: Sequence[NetworkTensor], **attributes: Any) -> list[NetworkTensor]:
        operation = getattr(operations, name)(*inputs, **attributes, compute_capability=compute_capability)
        layer = network.add_plugin(operation, aot=True)
        return [layer.get_output(index) for index in range(layer.num_outputs)]

    return add


def _profile(builder: Any, bindings: Bindings, profile: Profile) -> Any:
    made = builder.create_optimization_profile()
    for binding in bindings.inputs:
        if any(isinstance(size, str) for size in binding.shape):
            made.set_shape(binding.name, *(_sizes(binding, profile, which) for which in ("least", "usual", "most")))
    return made


def _sizes(binding: Binding, profile: Profile, which: str) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else getattr(profile[size], which) for size in binding.shape)
