"""`dflash-trt build`: two checkpoints become an engine directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dflash_trt.cli.engine_tables import io_table, memory_table
from dflash_trt.cli.options import directory, file, output_format

if TYPE_CHECKING:
    from dflash_trt.engine.build import Build
    from dflash_trt.engine.config import Backend, Dtype
    from dflash_trt.engine.directory import Engine
    from dflash_trt.engine.rank_builders import BuilderOptions


@click.command()
@click.option("--checkpoint_dir", type=directory, help="Directory that holds target/ and drafter/.")
@click.option(
    "--target_dir",
    type=click.Path(path_type=Path),
    help="Target: a Hugging Face directory or a GGUF file, instead of --checkpoint_dir.",
)
@click.option("--drafter_dir", type=directory, help="Its DFlash drafter, instead of --checkpoint_dir.")
@click.option("--output_dir", type=directory, required=True, help="Engine directory to write.")
@click.option(
    "--backend",
    type=click.Choice(["torch", "tensorrt_rtx", "tensorrt"]),
    default="torch",
    show_default=True,
    help="What will run the engine.",
)
@click.option(
    "--compute_capability",
    help="GPU that a TensorRT engine is for, as sm120; `dflash-trt doctor` says which there are.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32", "float64"]),
    default="auto",
    show_default=True,
    help="Type of weights, caches and computation; auto is the target checkpoint's.",
)
@click.option(
    "--max_batch_size", type=click.IntRange(1), default=8, show_default=True, help="Sequences decoded together."
)
@click.option(
    "--max_seq_len",
    type=click.IntRange(2),
    help="Prompt and output tokens together.  [default: the target's max_position_embeddings, at most 2048]",
)
@click.option(
    "--max_num_tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Prompt tokens that one pass takes.",
)
@click.option(
    "--tp_size", type=click.IntRange(1), default=1, show_default=True, help="Ranks that run the engine together."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Weight files, or ranks' engines, made side by side.  [default: as many as ranks, at most one a core]",
)
@click.option("--input_timing_cache", type=file, help="What an earlier build measured, to begin with (tensorrt).")
@click.option("--output_timing_cache", type=file, help="Where to write what this build measured (tensorrt).")
@click.option("--dry_run", is_flag=True, help="Check the pair and say what would be written, without writing it.")
@output_format
def build(
    checkpoint_dir: Path | None,
    target_dir: Path | None,
    drafter_dir: Path | None,
    output_dir: Path,
    backend: Backend,
    compute_capability: str | None,
    dtype: Dtype | Literal["auto"],
    max_batch_size: int,
    max_seq_len: int | None,
    max_num_tokens: int,
    tp_size: int,
    workers: int | None,
    input_timing_cache: Path | None,
    output_timing_cache: Path | None,
    dry_run: bool,
    output_format: str,
) -> None:
    """Build an engine directory from a target and its drafter."""
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.engine.build import plan_build
    from dflash_trt.engine.config import BuildConfig, checkpoint_dtype
    from dflash_trt.engine.rank_builders import BuilderOptions

    target_path, drafter_path = _checkpoints(checkpoint_dir, target_dir, drafter_dir)
    target, drafter = open_target(target_path), open_drafter(drafter_path)
    config = BuildConfig(
        dtype=checkpoint_dtype(target.weights) if dtype == "auto" else dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len or min(target.config.max_position_embeddings, BuildConfig.max_seq_len),
        max_num_tokens=max_num_tokens,
        tp_size=tp_size,
    )
    planned = plan_build(target, drafter, config, output_dir, backend, compute_capability)
    options = BuilderOptions(timing_input=input_timing_cache, timing_output=output_timing_cache)
    options.check(backend)
    if not dry_run:
        write(planned, min(tp_size, os.cpu_count() or 1) if workers is None else workers, options)
    if output_format == "json":
        click.echo(json.dumps(_told(planned, output_dir)))
        return
    click.echo(
        f"{output_dir}: {'would hold ' if dry_run else ''}{planned.weight_bytes / 1e6:.1f} MB of weights in "
        f"{config.dtype}, backend {_backend(planned)}{_ranks(planned)}; running it takes "
        f"{planned.config.cache_bytes / 1e6:.1f} MB of caches more{' on each rank' if tp_size > 1 else ''}"
    )
    if dry_run and planned.config.builder.tensorrt is not None:
        _print_tables(planned)


def write(build: Build, workers: int = 1, options: BuilderOptions | None = None) -> Engine:
    """Write an engine directory with a progress bar."""
    from dflash_trt.cli.progress import build_progress
    from dflash_trt.engine.rank_builders import BuilderOptions

    with build_progress(build.weight_bytes) as (advance, on_progress):
        return build.write(advance, workers, replace(options or BuilderOptions(), on_progress=on_progress))


def _print_tables(build: Build) -> None:
    from rich.console import Console

    from dflash_trt.engine.bindings import engine_bindings
    from dflash_trt.engine.memory import predict_memory
    from dflash_trt.inspection.engine import told_bindings

    console = Console()
    for name, bindings in engine_bindings(build.config).items():
        console.print(io_table(name, told_bindings(bindings)))
    console.print(memory_table(predict_memory(build), build.config.build_config.tp_size))


def _told(build: Build, output_dir: Path) -> dict[str, Any]:
    """The summary as JSON; of a TensorRT backend also inputs, outputs and memory of its engines."""
    from dflash_trt.engine.bindings import engine_bindings
    from dflash_trt.engine.memory import predict_memory
    from dflash_trt.inspection.engine import told_bindings

    told = {
        "engine_dir": str(output_dir),
        "builder": asdict(build.config.builder),
        "build_config": asdict(build.config.build_config),
        "weight_bytes": build.weight_bytes,
        "cache_bytes": build.config.cache_bytes,
    }
    if build.config.builder.tensorrt is None:
        return told
    memory = predict_memory(build)
    engines = {name: told_bindings(bindings) for name, bindings in engine_bindings(build.config).items()}
    return {**told, "engines": engines, "memory": {**asdict(memory), "total": memory.total}}


def _backend(build: Build) -> str:
    builder = build.config.builder
    return builder.backend if builder.tensorrt is None else f"{builder.backend} for {builder.compute_capability}"


def _ranks(build: Build) -> str:
    """How ranks share the weights, and what padding that takes; nothing of one rank."""
    ranks = build.config.build_config.tp_size
    if ranks == 1:
        return ""
    told = f", {build.weight_bytes / ranks / 1e6:.1f} MB on each of {ranks} ranks"
    padded = [
        f"{name} {dimension} {size} to {padded}"
        for name, part in (("target", build.target), ("drafter", build.drafter))
        for dimension, (size, padded) in part.padding(ranks).items()
    ]
    if padded:
        padding = build.target.padding_bytes(ranks) + build.drafter.padding_bytes(ranks)
        told += f", {padding / 1e6:.1f} MB of it all padding: {', '.join(padded)}"
    return told


def _checkpoints(checkpoint_dir: Path | None, target_dir: Path | None, drafter_dir: Path | None) -> tuple[Path, Path]:
    if checkpoint_dir is not None and target_dir is None and drafter_dir is None:
        return checkpoint_dir / "target", checkpoint_dir / "drafter"
    if checkpoint_dir is None and target_dir is not None and drafter_dir is not None:
        return target_dir, drafter_dir
    raise click.UsageError("give either --checkpoint_dir, or both --target_dir and --drafter_dir")
