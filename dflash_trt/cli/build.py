"""`dflash-trt build`: two checkpoints become an engine directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dflash_trt.cli.options import directory

if TYPE_CHECKING:
    from dflash_trt.engine.build import Build
    from dflash_trt.engine.config import Backend, Dtype
    from dflash_trt.engine.directory import Engine


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
    "--backend", type=click.Choice(["torch"]), default="torch", show_default=True, help="What will run the engine."
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
    help="Weight files written side by side.  [default: as many as ranks, at most one a core]",
)
@click.option("--dry_run", is_flag=True, help="Check the pair and say what would be written, without writing it.")
def build(
    checkpoint_dir: Path | None,
    target_dir: Path | None,
    drafter_dir: Path | None,
    output_dir: Path,
    backend: Backend,
    dtype: Dtype | Literal["auto"],
    max_batch_size: int,
    max_seq_len: int | None,
    max_num_tokens: int,
    tp_size: int,
    workers: int | None,
    dry_run: bool,
) -> None:
    """Build an engine directory from a target and its drafter."""
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.engine.build import plan_build
    from dflash_trt.engine.config import BuildConfig, checkpoint_dtype

    target_path, drafter_path = _checkpoints(checkpoint_dir, target_dir, drafter_dir)
    target, drafter = open_target(target_path), open_drafter(drafter_path)
    config = BuildConfig(
        dtype=checkpoint_dtype(target.weights) if dtype == "auto" else dtype,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len or min(target.config.max_position_embeddings, BuildConfig.max_seq_len),
        max_num_tokens=max_num_tokens,
        tp_size=tp_size,
    )
    planned = plan_build(target, drafter, config, output_dir, backend)
    if not dry_run:
        write(planned, min(tp_size, os.cpu_count() or 1) if workers is None else workers)
    click.echo(
        f"{output_dir}: {'would hold ' if dry_run else ''}{planned.weight_bytes / 1e6:.1f} MB of weights in "
        f"{config.dtype}, backend {backend}{_ranks(planned)}; running it takes "
        f"{planned.config.cache_bytes / 1e6:.1f} MB of caches more{' on each rank' if tp_size > 1 else ''}"
    )


def write(build: Build, workers: int = 1) -> Engine:
    """Write an engine directory with a progress bar."""
    from dflash_trt.cli.progress import bytes_progress

    with bytes_progress("building", build.weight_bytes) as advance:
        return build.write(advance, workers)


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
