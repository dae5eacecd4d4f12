"""`dflash-trt convert`: a target and its drafter become quantized checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.options import directory

if TYPE_CHECKING:
    from dflash_trt.conversion.convert import Conversion
    from dflash_trt.conversion.plan import KVCacheQFormat, QFormat

_qformat = click.Choice(["bf16", "fp8", "nvfp4", "w4a16_nvfp4"])
_kv_cache_qformat = click.Choice(["none", "fp8"])


@click.command()
@click.option(
    "--target_dir",
    type=click.Path(path_type=Path),
    required=True,
    help="Target: a Hugging Face directory or a GGUF file.",
)
@click.option("--drafter_dir", type=directory, help="Its DFlash drafter.  [default: only the target is converted]")
@click.option("--output_dir", type=directory, required=True, help="Will hold target/ and drafter/.")
@click.option(
    "--qformat",
    type=_qformat,
    required=True,
    help="Format of the target's linear layers. fp8 and nvfp4 also quantize activations; w4a16_nvfp4 is nvfp4 without "
    "that; bf16 quantizes nothing.",
)
@click.option("--drafter_qformat", type=_qformat, default="bf16", show_default=True, help="The same for the drafter.")
@click.option(
    "--kv_cache_qformat",
    type=_kv_cache_qformat,
    default="none",
    show_default=True,
    help="Format of the target's cached keys and values; none is the type that an engine computes in.",
)
@click.option(
    "--drafter_kv_cache_qformat",
    type=_kv_cache_qformat,
    default="none",
    show_default=True,
    help="The same for the drafter.",
)
@click.option(
    "--exclude_modules",
    multiple=True,
    help="Layers of the target to leave unquantized, beside lm_head and routers: a name, or a pattern with *; may be "
    "given again.",
)
@click.option("--drafter_exclude_modules", multiple=True, help="The same for the drafter, where fc is always left.")
@click.option(
    "--calib_dataset",
    type=click.Path(path_type=Path),
    help="Text to calibrate with: JSONL with messages, prompt or text, or plain text.",
)
@click.option("--calib_size", type=click.IntRange(1), default=128, show_default=True, help="Samples taken from it.")
@click.option("--calib_seq_len", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a sample.")
@click.option("--resume", is_flag=True, help="Go on with a conversion that broke off; start one where there is none.")
def convert(
    target_dir: Path,
    drafter_dir: Path | None,
    output_dir: Path,
    qformat: QFormat,
    drafter_qformat: QFormat,
    kv_cache_qformat: KVCacheQFormat,
    drafter_kv_cache_qformat: KVCacheQFormat,
    exclude_modules: tuple[str, ...],
    drafter_exclude_modules: tuple[str, ...],
    calib_dataset: Path | None,
    calib_size: int,
    calib_seq_len: int,
    resume: bool,
) -> None:
    """Quantize a target and its drafter, each to its own format.

    Writes checkpoints in ModelOpt's unified layout, which `dflash-trt build`, TensorRT-LLM, vLLM and SGLang load. One
    file of the source is in memory at a time.
    """
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.conversion.convert import CalibrationData, plan_conversion
    from dflash_trt.conversion.plan import Formats

    _refuse_idle_options(drafter_dir, calib_dataset)
    conversion = plan_conversion(
        open_target(target_dir),
        Formats(qformat, kv_cache_qformat, exclude_modules),
        None if drafter_dir is None else open_drafter(drafter_dir),
        Formats(drafter_qformat, drafter_kv_cache_qformat, drafter_exclude_modules),
        None if calib_dataset is None else CalibrationData(calib_dataset, calib_size, calib_seq_len),
        output_dir,
        resume=resume,
    )
    for line in run(conversion):
        click.echo(line)


def run(conversion: Conversion) -> list[str]:
    """Run a conversion with progress bars; what it made, in lines."""
    from dflash_trt.cli.progress import bytes_progress, count_progress
    from dflash_trt.conversion.convert import summary, unfinished_dir

    bars = {"bytes": bytes_progress, "samples": count_progress}
    try:
        calibrations = conversion.run(lambda what, total, unit: bars[unit](what, total))
    except BaseException:
        unfinished = unfinished_dir(conversion.output_dir)
        if unfinished.exists():
            click.echo(f"dflash-trt: what is finished is kept in {unfinished}; --resume goes on from there", err=True)
        raise
    return [
        f"{conversion.output_dir / name}: {summary(plan)}"
        + (f"; calibration: {calibrations[name]}" if name in calibrations else "")
        for name, plan in conversion.plans.items()
    ]


def _refuse_idle_options(drafter_dir: Path | None, calib_dataset: Path | None) -> None:
    """An option that would do nothing is a mistake."""
    context = click.get_current_context()

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    if drafter_dir is None:
        for name in ("drafter_qformat", "drafter_kv_cache_qformat", "drafter_exclude_modules"):
            if given(name):
                raise click.UsageError(f"--{name} needs --drafter_dir")
    if calib_dataset is None:
        for name in ("calib_size", "calib_seq_len"):
            if given(name):
                raise click.UsageError(f"--{name} needs --calib_dataset")
