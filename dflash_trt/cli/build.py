"""`dflash-trt build`: two checkpoints become an engine directory."""

from __future__ import annotations

from pathlib import Path

import click

from dflash_trt.cli.options import directory


@click.command()
@click.option("--checkpoint_dir", type=directory, help="Directory that holds target/ and drafter/.")
@click.option(
    "--target_dir",
    type=click.Path(path_type=Path),
    help="Target: a Hugging Face directory or a GGUF file, instead of --checkpoint_dir.",
)
@click.option("--drafter_dir", type=directory, help="Its DFlash drafter, instead of --checkpoint_dir.")
@click.option("--output_dir", type=directory, required=True, help="Engine directory to write.")
@click.option("--backend", type=click.Choice(["torch"]), default="torch", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32", "float64"]),
    default="auto",
    show_default=True,
    help="Type of weights, caches and computation; auto is the target checkpoint's.",
)
@click.option("--max_batch_size", type=int, default=8, show_default=True, help="Sequences decoded together.")
@click.option("--max_seq_len", type=int, default=2048, show_default=True, help="Prompt and output tokens together.")
@click.option("--max_num_tokens", type=int, default=512, show_default=True, help="Prompt tokens that one pass takes.")
@click.option("--dry_run", is_flag=True, help="Check the pair and say what would be written, without writing it.")
def build(
    checkpoint_dir: Path | None,
    target_dir: Path | None,
    drafter_dir: Path | None,
    output_dir: Path,
    backend: str,
    dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    dry_run: bool,
) -> None:
    """Build an engine directory from a target and its drafter."""
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.cli.progress import bytes_progress
    from dflash_trt.engine.build import build_engine, plan_build
    from dflash_trt.engine.config import BuildConfig, checkpoint_dtype

    target_path, drafter_path = _checkpoints(checkpoint_dir, target_dir, drafter_dir)
    target, drafter = open_target(target_path), open_drafter(drafter_path)
    config = BuildConfig(
        dtype=checkpoint_dtype(target.weights) if dtype == "auto" else dtype,  # type: ignore[arg-type]
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
    )
    plan = plan_build(target, drafter, config)
    size = sum(spec.nbytes for specs in plan for spec in specs)
    if dry_run:
        click.echo(f"{output_dir}: would hold {size / 1e6:.1f} MB of weights in {config.dtype}")
        return
    with bytes_progress("building", size) as advance:
        build_engine(target, drafter, config, output_dir, advance)
    click.echo(f"{output_dir}: {size / 1e6:.1f} MB of weights in {config.dtype}, backend {backend}")


def _checkpoints(checkpoint_dir: Path | None, target_dir: Path | None, drafter_dir: Path | None) -> tuple[Path, Path]:
    if checkpoint_dir is not None and target_dir is None and drafter_dir is None:
        return checkpoint_dir / "target", checkpoint_dir / "drafter"
    if checkpoint_dir is None and target_dir is not None and drafter_dir is not None:
        return target_dir, drafter_dir
    raise click.UsageError("give either --checkpoint_dir, or both --target_dir and --drafter_dir")
