"""Building an engine directory from two checkpoints."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt import __version__
from dflash_trt.checkpoint.example_prompts import example_prompts_file
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.safetensors_writer import TensorSpec
from dflash_trt.checkpoint.tokenizer import load_tokenizer, tokenizer_files, write_files
from dflash_trt.engine.compatibility import builder_here, check_builds_here
from dflash_trt.engine.config import Backend, BuildConfig, Builder, EngineConfig
from dflash_trt.engine.copies import check_copies
from dflash_trt.engine.directory import Engine, check_output_dir, rank_files, write_config, written_whole
from dflash_trt.engine.parts import Part, Progress, write_parts
from dflash_trt.engine.rank_builders import BuilderOptions, RankBuilders
from dflash_trt.engine.support import check_support
from dflash_trt.engine.weights import check_scales
from dflash_trt.errors import UserError, access
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.sharding import REPLICATED, local_shape, splits
from dflash_trt.models.weights import Manifest


@dataclass(frozen=True)
class Build:
    """A build that was checked, and only has to be written."""

    config: EngineConfig
    target: Part
    drafter: Part
    files: dict[str, bytes]
    """The tokenizer's files and the drafter's example prompts, by name."""
    output_dir: Path
    """Where the engine directory will stand, links followed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors that will be written, of all ranks."""
        specs = (*self.target.specs, *self.drafter.specs)
        return self.config.build_config.tp_size * sum(spec.nbytes for spec in specs)

    def write(
        self,
        progress: Progress = lambda size: None,
        workers: int = 1,
        options: BuilderOptions = BuilderOptions(),  # noqa: B008, it is frozen
    ) -> Engine:
        """Write the engine directory; one tensor a worker is in memory at a time, or one network.

        Args:
            progress: called from the workers' threads where there are several.
            workers: files that are written side by side, or ranks whose engines are built so.
            options: of TensorRT backends.

        Raises:
            UserError: a tensor is not finite or too large for the type, TensorRT is missing or refuses a network, or
                `output_dir` cannot be written.
            BuildFailed: the process that builds a rank's engines died.
        """
        builder = self.config.builder
        options.check(builder.backend)
        if builder.tensorrt is not None:
            check_builds_here(builder)
        with written_whole(self.output_dir) as directory:
            with access(self.output_dir, "written"):
                _write_small_files(directory, self.config, self.files)
            if builder.tensorrt is None:
                self.write_weights(directory, workers, progress)
            else:
                self._build_engines(directory, workers, progress, options)
        return Engine(self.output_dir, self.config)

    def write_weights(self, directory: Path, workers: int = 1, progress: Progress = lambda size: None) -> None:
        """Write every rank's weights as the torch backend has them; see `write_parts`."""
        with access(self.output_dir, "written"):
            for file in rank_files(directory, 0):
                file.parent.mkdir(parents=True)
        write_parts(self.target, self.drafter, self.config, directory, workers, progress)

    def _build_engines(self, directory: Path, workers: int, progress: Progress, options: BuilderOptions) -> None:
        parts, engine = directory / "parts", Engine(directory, self.config)
        self.write_weights(parts, workers, progress)
        for file in engine.tensorrt_files(0):
            file.parent.mkdir(exist_ok=True)
        RankBuilders(engine, parts, options).run(workers)
        shutil.rmtree(parts)


def build_engine(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    config: BuildConfig,
    output_dir: Path,
    progress: Progress = lambda size: None,
) -> Engine:
    """Check the pair, then write its engine directory.

    Raises:
        UserError: the pair, a tensor or an option cannot be served, or `output_dir` cannot be written.
    """
    return plan_build(target, drafter, config, output_dir).write(progress)


def plan_build(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    config: BuildConfig,
    output_dir: Path,
    backend: Backend = "torch",
    compute_capability: str | None = None,
) -> Build:
    """Check all that can be checked without converting the weights or loading a builder.

    Of the weights it reads headers, and those tensors that must be copies of others.

    Args:
        compute_capability: the GPU that TensorRT engines are for, sm120 for one.

    Raises:
        UserError: as `build_engine`, but for numbers that are not finite or too large for the type.
    """
    place = check_output_dir(output_dir)
    check_pairing(target.config, target.path, drafter.config, drafter.path)
    _check_length(target, config)
    check_support(backend, compute_capability, config, target.config, drafter.config)
    builder = builder_here(backend, compute_capability)
    engine_config = EngineConfig(
        version=__version__,
        pretrained_config=target.config,
        speculative_config=drafter.config,
        build_config=config,
        builder=builder,
        build_id=_build_id(target, drafter, config, builder),
    )
    manifests = target_manifest(target), drafter_manifest(drafter)
    for manifest in manifests:
        check_scales(manifest)
    _check_ranks(manifests, config.tp_size)
    target_part, drafter_part = (_part(manifest, config) for manifest in manifests)
    tokenizer = tokenizer_files(target.path)
    _check_tokenizer(tokenizer, engine_config, target.path)
    check_copies(target, drafter)
    return Build(engine_config, target_part, drafter_part, tokenizer | example_prompts_file(drafter.path), place)


def _part(manifest: Manifest, config: BuildConfig) -> Part:
    """Quantized tensors and their scales stay as they are, to the byte; all others take one type."""
    floats = [(name, config.torch_dtype, shape) for name, shape in manifest.floats.items()]
    ids = [(name, torch.int64, shape) for name, shape in manifest.others.items()]
    kept = {**manifest.quantized, **manifest.scales}
    tensors = floats + ids + [(name, manifest.weights.dtype(name), shape) for name, shape in kept.items()]
    specs = [
        TensorSpec(name, dtype, local_shape(shape, manifest.shardings.get(name, REPLICATED), config.tp_size))
        for name, dtype, shape in tensors
    ]
    return Part(manifest.weights, specs, manifest.shardings)


def _build_id(target: TargetCheckpoint, drafter: DrafterCheckpoint, config: BuildConfig, builder: Builder) -> str:
    """Of the same files and options always the same. Files count by name, size and time: reading them takes long."""
    known = (__version__, target.config, drafter.config, config, builder)
    digest = hashlib.blake2b(repr(known).encode(), digest_size=8)
    for weights in (target.weights, drafter.weights):
        for file in sorted({weights.file_of(name) for name in weights.names()}):
            with access(file, "read"):
                status = file.stat()
            digest.update(repr((file.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()


def _check_ranks(manifests: Sequence[Manifest], ranks: int) -> None:
    """Whether every tensor can be divided among so many ranks."""
    rules = [(rule, manifest) for manifest in manifests for rule in splits(manifest.shardings.values())]
    refusal = next(((rule, manifest) for rule, manifest in rules if not rule.permits(ranks)), None)
    if refusal is not None:
        rule, manifest = refusal
        most = max(rule.units for rule, _ in rules if rule.uneven == "refuse")
        works = [str(size) for size in range(1, most + 1) if all(rule.permits(size) for rule, _ in rules)]
        raise UserError(
            f"tp_size is {ranks}, which does not divide {rule.dimension}, {rule.units} in {manifest.weights.path}; "
            f"{' or '.join(filter(None, (', '.join(works[:-1]), works[-1])))} would work"
        )


def _check_length(target: TargetCheckpoint, config: BuildConfig) -> None:
    trained = target.config.max_position_embeddings
    if config.max_seq_len > trained:
        raise UserError(
            f"max_seq_len is {config.max_seq_len}, above max_position_embeddings {trained} of {target.path}; "
            f"give {trained} or less"
        )


def _write_small_files(directory: Path, config: EngineConfig, files: dict[str, bytes]) -> None:
    write_config(directory, config)
    write_files(directory, files)


def _check_tokenizer(files: dict[str, bytes], config: EngineConfig, origin: Path) -> None:
    """Load it as it will be loaded from the engine directory: only that shows whether it is damaged."""
    with tempfile.TemporaryDirectory() as directory:
        _write_small_files(Path(directory), config, files)
        load_tokenizer(Path(directory), origin)
