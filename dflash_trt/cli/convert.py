"""`dflash-trt convert`: a target and its drafter become quantized checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from dflash_trt.cli.options import directory

if TYPE_CHECKING:
    from dflash_trt.benchmarking.quality import Models
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
    help="Text to calibrate with: .jsonl with messages, conversations, prompt or text, or a plain .txt.",
)
@click.option("--calib_size", type=click.IntRange(1), default=128, show_default=True, help="Samples taken from it.")
@click.option(
    "--calib_seq_len",
    type=click.IntRange(2),
    help="Tokens of a sample, at most.  [default: 512, or the target's max_position_embeddings where that is less]",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure what the conversion cost, print it, and write it to this JSON file.",
)
@click.option(
    "--report_dataset",
    type=click.Path(path_type=Path),
    help="Held-out text, read as --calib_dataset is: originals and converted models are run on it, on this CPU.  "
    "[default: only weights are compared]",
)
@click.option("--report_size", type=click.IntRange(1), default=16, show_default=True, help="Samples taken from it.")
@click.option("--report_seq_len", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a sample.")
@click.option(
    "--report_dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="What originals and converted models are run in; packed weights and FP8 caches stay what they are.",
)
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
    calib_seq_len: int | None,
    report: Path | None,
    report_dataset: Path | None,
    report_size: int,
    report_seq_len: int,
    report_dtype: str,
    resume: bool,
) -> None:
    """Quantize a target and its drafter, each to its own format.

    Writes checkpoints in ModelOpt's unified layout, which `dflash-trt build`, TensorRT-LLM, vLLM and SGLang load. One
    file of the source is mapped at a time.
    """
    import torch

    from dflash_trt.benchmarking.quality import Models, machine_memory, measure_quality, read_held_out_text
    from dflash_trt.benchmarking.quality_report import check_report_file, write_report
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.cli.quality_table import print_quality
    from dflash_trt.conversion.convert import CalibrationData, plan_conversion, unfinished_dir
    from dflash_trt.conversion.plan import Formats

    _refuse_idle_options(drafter_dir, calib_dataset, report, report_dataset)
    original = Models(open_target(target_dir), None if drafter_dir is None else open_drafter(drafter_dir))
    text = None
    if report is not None:
        check_report_file(report, output_dir)
    if report_dataset is not None:
        dtype = getattr(torch, report_dtype)
        text = read_held_out_text(
            report_dataset, original.target, size=report_size, max_length=report_seq_len, dtype=dtype
        )
    longest = calib_seq_len or min(original.target.config.max_position_embeddings, 512)
    conversion = plan_conversion(
        original.target,
        Formats(qformat, kv_cache_qformat, exclude_modules),
        original.drafter,
        Formats(drafter_qformat, drafter_kv_cache_qformat, drafter_exclude_modules),
        None if calib_dataset is None else CalibrationData(calib_dataset, calib_size, longest),
        output_dir,
        resume=resume,
    )
    try:
        lines = carry_out(conversion)
    except (KeyboardInterrupt, SystemExit):
        unfinished = unfinished_dir(conversion.output_dir)
        if unfinished.exists():
            click.echo(f"dflash-trt: what is finished is kept in {unfinished}; --resume goes on from there", err=True)
        raise
    for line in lines:
        click.echo(line)
    if report is not None:
        found = measure_quality(original, _converted(conversion), text, memory=machine_memory(), bar=_bar)
        write_report(found, report)
        print_quality(found)


def _converted(conversion: Conversion) -> Models:
    from dflash_trt.benchmarking.quality import Models
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target

    target, drafter = conversion.output_dir / "target", conversion.output_dir / "drafter"
    return Models(open_target(target), None if conversion.drafter is None else open_drafter(drafter))


def carry_out(conversion: Conversion) -> list[str]:
    """Run a conversion with progress bars; what it made, in lines."""
    from dflash_trt.conversion.convert import summary

    calibrations = conversion.run(_bar)
    return [
        f"{conversion.output_dir / name}: {summary(plan)}"
        + (f"; calibration: {calibrations[name]}" if name in calibrations else "")
        for name, plan in conversion.plans.items()
    ]


def _bar(what: str, total: int, unit: Literal["bytes", "samples"]) -> AbstractContextManager[Callable[[int], None]]:
    from dflash_trt.cli.progress import bytes_progress, count_progress

    return bytes_progress(what, total) if unit == "bytes" else count_progress(what, total)


def _refuse_idle_options(
    drafter_dir: Path | None, calib_dataset: Path | None, report: Path | None, report_dataset: Path | None
) -> None:
    """An option that would do nothing is a mistake."""
    context = click.get_current_context()

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    needed = {
        "drafter_dir": (drafter_dir, ("drafter_qformat", "drafter_kv_cache_qformat", "drafter_exclude_modules")),
        "calib_dataset": (calib_dataset, ("calib_size", "calib_seq_len")),
        "report": (report, ("report_dataset",)),
        "report_dataset": (report_dataset, ("report_size", "report_seq_len", "report_dtype")),
    }
    for option, (value, idle) in needed.items():
        for name in idle:
            if value is None and given(name):
                raise click.UsageError(f"--{name} needs --{option}")
