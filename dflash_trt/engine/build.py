"""Building an engine directory of the torch backend from two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from dflash_trt import __version__
from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.engine.config import BuildConfig, Builder, EngineConfig
from dflash_trt.engine.directory import Engine, write_config, written_whole
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest, target_manifest
from dflash_trt.models.weights import Manifest

Progress = Callable[[int], None]
"""Told the bytes of every tensor as it is written."""


def build_engine(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    config: BuildConfig,
    output_dir: Path,
    progress: Progress = lambda size: None,
) -> Engine:
    """Check the pair, then write its engine directory; one tensor is in memory at a time.

    Raises:
        UserError: the pair, a tensor or an option cannot be served, or `output_dir` cannot be written.
    """
    engine_config = EngineConfig(
        version=__version__,
        pretrained_config=target.config,
        speculative_config=drafter.config,
        build_config=config,
        builder=Builder("torch", torch.__version__),
    )
    plan = plan_build(target, drafter, config)
    _check_tied_head(target)
    with written_whole(output_dir) as directory:
        write_config(directory, engine_config)
        save_tokenizer(target.path, directory)
        engine = Engine(directory, engine_config)
        for weights, specs, file in zip(
            (target.weights, drafter.weights),
            plan,
            (engine.target_weights, engine.drafter_weights),
            strict=True,
        ):
            file.parent.mkdir()
            write_safetensors(file, specs, _converted(weights, specs, progress))
    return Engine(output_dir, engine_config)


def plan_build(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, config: BuildConfig
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """The tensors that target and drafter become, read from headers alone.

    Raises:
        UserError: as `build_engine` does, but for what only the data can show.
    """
    check_pairing(target.config, target.path, drafter.config, drafter.path)
    _check_length(target, config)
    dtype = getattr(torch, config.dtype)
    return _specs(target_manifest(target), dtype), _specs(drafter_manifest(drafter), dtype)


def _specs(manifest: Manifest, dtype: torch.dtype) -> list[TensorSpec]:
    floats = [TensorSpec(name, dtype, shape) for name, shape in manifest.floats.items()]
    return floats + [TensorSpec(name, torch.int64, shape) for name, shape in manifest.others.items()]


def _check_length(target: TargetCheckpoint, config: BuildConfig) -> None:
    trained = target.config.max_position_embeddings
    if config.max_seq_len > trained:
        raise UserError(
            f"max_seq_len is {config.max_seq_len}, above max_position_embeddings {trained} of {target.path}; "
            f"give {trained} or less"
        )


def _check_tied_head(target: TargetCheckpoint) -> None:
    """A tied head may be stored once more, as a copy; a head of its own would silently be lost."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    weights = target.weights
    if not target.config.tie_word_embeddings or head not in weights:
        return
    if weights.dtype(head) != weights.dtype(embedding) or not torch.equal(weights.read(head), weights.read(embedding)):
        raise UserError(
            f"{weights.file_of(head)}: {head} is not a copy of {embedding}, which the config's tie_word_embeddings "
            "says it is; set that to false, or remove the tensor"
        )


def _converted(weights: Weights, specs: list[TensorSpec], progress: Progress) -> Iterator[torch.Tensor]:
    for spec in specs:
        tensor = weights.read(spec.name)
        where = f"{weights.file_of(spec.name)}: {spec.name}"
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{where} holds NaN or infinity; the checkpoint is damaged")
        converted = tensor.to(spec.dtype)
        if not bool(torch.isfinite(converted).all()):
            largest = tensor.abs().max().item()
            raise UserError(f"{where} holds {largest:.3g}, beyond {spec.dtype}; build with --dtype bfloat16 or float32")
        yield converted
        progress(spec.nbytes)
