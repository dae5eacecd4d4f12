"""Building an engine directory of the torch backend from two checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_trt import __version__
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.tokenizer import load_tokenizer, tokenizer_files
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.engine.config import Backend, BuildConfig, Builder, EngineConfig
from dflash_trt.engine.directory import Engine, check_output_dir, write_config, written_whole
from dflash_trt.engine.weights import DAMAGED, check_packed, check_scales
from dflash_trt.errors import UserError, access
from dflash_trt.models.dflash import copies_of_target
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import PACKED_DTYPES, Manifest

Progress = Callable[[int], None]
"""Told the bytes of every tensor as it is written."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Build:
    """A build that was checked, and only has to be written."""

    config: EngineConfig
    target: Weights
    target_specs: list[TensorSpec]
    """What the target's tensors become."""
    drafter: Weights
    drafter_specs: list[TensorSpec]
    tokenizer: dict[str, bytes]
    """The tokenizer's files by name."""
    output_dir: Path
    """Where the engine directory will stand, links followed."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(spec.nbytes for spec in (*self.target_specs, *self.drafter_specs))

    def write(self, progress: Progress = lambda size: None) -> Engine:
        """Write the engine directory; one tensor is in memory at a time.

        Raises:
            UserError: a tensor is not finite or too large for the type, or `output_dir` cannot be written.
        """
        with written_whole(self.output_dir) as directory:
            engine = Engine(directory, self.config)
            with access(self.output_dir, "written"):
                _write_small_files(directory, self.config, self.tokenizer)
                engine.target_weights.parent.mkdir()
                engine.drafter_weights.parent.mkdir()
            target = _converted(self.target, self.target_specs, progress)
            write_safetensors(engine.target_weights, self.target_specs, target)
            drafter = _converted(self.drafter, self.drafter_specs, progress)
            write_safetensors(engine.drafter_weights, self.drafter_specs, drafter)
        return Engine(self.output_dir, self.config)


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
) -> Build:
    """Check all that can be checked without converting the weights.

    Of the weights it reads headers, and those tensors that must be copies of others.

    Raises:
        UserError: as `build_engine`, but for numbers that are not finite or too large for the type.
    """
    place = check_output_dir(output_dir)
    check_pairing(target.config, target.path, drafter.config, drafter.path)
    _check_length(target, config)
    engine_config = EngineConfig(
        version=__version__,
        pretrained_config=target.config,
        speculative_config=drafter.config,
        build_config=config,
        builder=Builder(backend, torch.__version__),
    )
    dtype = getattr(torch, config.dtype)
    manifests = target_manifest(target), drafter_manifest(drafter)
    for manifest in manifests:
        check_scales(manifest)
    target_specs, drafter_specs = (_specs(manifest, dtype) for manifest in manifests)
    tokenizer = tokenizer_files(target.path)
    _check_tokenizer(tokenizer, engine_config, target.path)
    _check_copies(target, drafter)
    return Build(engine_config, target.weights, target_specs, drafter.weights, drafter_specs, tokenizer, place)


def _specs(manifest: Manifest, dtype: torch.dtype) -> list[TensorSpec]:
    """Quantized tensors and their scales stay as they are, to the byte; all others take one type."""
    floats = [TensorSpec(name, dtype, shape) for name, shape in manifest.floats.items()]
    ids = [TensorSpec(name, torch.int64, shape) for name, shape in manifest.others.items()]
    kept = {**manifest.quantized, **manifest.scales}
    return floats + ids + [TensorSpec(name, manifest.weights.dtype(name), shape) for name, shape in kept.items()]


def _check_length(target: TargetCheckpoint, config: BuildConfig) -> None:
    trained = target.config.max_position_embeddings
    if config.max_seq_len > trained:
        raise UserError(
            f"max_seq_len is {config.max_seq_len}, above max_position_embeddings {trained} of {target.path}; "
            f"give {trained} or less"
        )


def _write_small_files(directory: Path, config: EngineConfig, tokenizer: dict[str, bytes]) -> None:
    write_config(directory, config)
    for name, content in tokenizer.items():
        (directory / name).write_bytes(content)


def _check_tokenizer(files: dict[str, bytes], config: EngineConfig, origin: Path) -> None:
    """Load it as it will be loaded from the engine directory: only that shows whether it is damaged."""
    with tempfile.TemporaryDirectory() as directory:
        _write_small_files(Path(directory), config, files)
        load_tokenizer(Path(directory), origin)


def _check_copies(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """What is left out because another tensor stands for it must equal that: a tensor of its own would be lost."""
    tied = target.config.tie_word_embeddings
    if tied and _HEAD in target.weights:
        _check_copy(
            target.weights,
            _HEAD,
            target.weights,
            _EMBEDDING,
            "which the config's tie_word_embeddings says it is; set that to false, or remove the tensor",
        )
    for name, original in copies_of_target(drafter.config).items():
        if name in drafter.weights:
            _check_copy(
                drafter.weights,
                name,
                target.weights,
                _EMBEDDING if tied and original == _HEAD else original,
                "which the drafter reads instead; give the target that the drafter was made for, unquantized",
            )


def _check_copy(weights: Weights, name: str, others: Weights, original: str, why: str) -> None:
    """Equal byte by byte once both have the copy's type, which may be a narrower one."""
    same = weights.shape(name) == others.shape(original) and torch.equal(
        weights.read(name).view(torch.uint8), others.read(original).to(weights.dtype(name)).view(torch.uint8)
    )
    if not same:
        whose = "" if weights is others else f" of {others.file_of(original)}"
        raise UserError(f"{weights.file_of(name)}: {name} is not a copy of {original}{whose}, {why}")


def _converted(weights: Weights, specs: list[TensorSpec], progress: Progress) -> Iterator[torch.Tensor]:
    for spec in specs:
        tensor = weights.read(spec.name)
        if spec.dtype in PACKED_DTYPES.values():
            check_packed(spec.name, tensor, weights.file_of(spec.name))
            yield tensor
        else:
            yield _in_type(tensor, spec, weights.file_of(spec.name))
        progress(spec.nbytes)


def _in_type(tensor: torch.Tensor, spec: TensorSpec, file: Path) -> torch.Tensor:
    where = f"{file}: {spec.name}"
    if not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{where} holds NaN or infinity; {DAMAGED}")
    converted = tensor.to(spec.dtype)
    if not bool(torch.isfinite(converted).all()):
        largest = tensor.abs().max().item()
        raise UserError(f"{where} holds {largest:.3g}, beyond {spec.dtype}; build with --dtype bfloat16 or float32")
    return converted
