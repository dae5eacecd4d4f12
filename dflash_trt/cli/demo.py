"""`dflash-trt demo`: the whole pipeline on a real small model, on this machine."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.build import write
from dflash_trt.cli.convert import carry_out
from dflash_trt.cli.options import device, directory

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_trt.engine.directory import Engine
    from dflash_trt.runtime.generation import Generation, TokenStream
    from dflash_trt.runtime.llm import LLM

PROMPTS = (
    "Write a Python function that reverses a string.",
    "How do I read a text file line by line in Python?",
    "What is a list comprehension in Python? Give an example.",
)

_SLICE = 8
"""Tokens that one way of decoding is ahead of the other at most, but for the last pass's."""


@click.command()
@click.option(
    "--output_dir",
    type=directory,
    default=Path("engines/smollm2-135m"),
    show_default=True,
    help="Engine directory to write.",
)
@click.option(
    "--max_output_len", type=click.IntRange(1), default=96, show_default=True, help="Output tokens of each prompt."
)
@click.option(
    "--verify_window",
    type=click.IntRange(1, 8),
    default=3,
    show_default=True,
    help="Tokens verified in a pass; the drafter's block is 8. The demo is too short for a window that adapts.",
)
@device
def demo(output_dir: Path, max_output_len: int, verify_window: int, device: str | None) -> None:
    """Quantize SmolLM2-135M-Instruct to FP8, build an engine of it and its drafter, and decode three prompts, with
    speculation and without."""
    from rich.console import Console

    from dflash_trt.runtime.llm import LLM

    console = Console(highlight=False)
    path = _build(output_dir).path
    with LLM(path, device=device) as llm, LLM(path, device=device) as baseline:
        # The first passes bring the weights into memory.
        _in_turns(_start(llm, PROMPTS[0], 8, verify_window), _start(baseline, PROMPTS[0], 8, 1))
        console.print("[green]Green[/green] text was drafted and accepted; the rest are the target's own tokens.\n")
        totals: list[tuple[Generation, Generation]] = []
        for prompt in PROMPTS:
            console.print(f"[bold]> {prompt}[/bold]")
            streams = _start(llm, prompt, max_output_len, verify_window), _start(baseline, prompt, max_output_len, 1)
            totals.append(_in_turns(*streams, console))
            console.print(f"\n[dim]{_comparison(*totals[-1])}[/dim]\n", soft_wrap=True)
    with_drafts, without = (sum(generation.seconds for generation in each) for each in zip(*totals, strict=True))
    console.print(
        f"All three: {with_drafts:.1f} s with speculation, {without:.1f} s without: {without / with_drafts:.2f}x"
    )
    console.print(f'The engine stays: dflash-trt run --engine_dir {output_dir} --prompt "..."', soft_wrap=True)


def _build(output_dir: Path) -> Engine:
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.conversion.convert import CalibrationData, plan_conversion
    from dflash_trt.conversion.plan import Formats
    from dflash_trt.engine.build import plan_build
    from dflash_trt.engine.config import BuildConfig
    from dflash_trt.engine.directory import check_output_dir
    from dflash_trt.examples.smollm2 import CALIBRATION, DRAFTER, gguf_file

    check_output_dir(output_dir)
    target, drafter = open_target(gguf_file()), open_drafter(DRAFTER)
    config = BuildConfig(dtype="float32", max_batch_size=4, max_seq_len=1024)
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Path(directory) / "smollm2-135m-fp8"
        data = CalibrationData(CALIBRATION, size=16, max_length=512)
        for line in carry_out(plan_conversion(target, Formats("fp8"), drafter, Formats("bf16"), data, checkpoints)):
            click.echo(line.removeprefix(f"{checkpoints}/"))
        target, drafter = open_target(checkpoints / "target"), open_drafter(checkpoints / "drafter")
        return write(plan_build(target, drafter, config, output_dir))


def _start(llm: LLM, prompt: str, max_output_len: int, verify_window: int) -> TokenStream:
    from dflash_trt.runtime.sampling import SamplingParams

    ids = llm.encode_chat([{"role": "user", "content": prompt}])
    return llm.stream([ids], SamplingParams(max_tokens=max_output_len), verify_window=verify_window)


def _in_turns(
    speculative: TokenStream, plain: TokenStream, console: Console | None = None
) -> tuple[Generation, Generation]:
    """Decode both, a slice of each at a time, so that what else the machine does slows both alike; show the first."""
    from rich.text import Text

    running = True
    while running:
        running = False
        for emission in islice(speculative, _SLICE):
            running = True
            if console is not None:
                console.print(Text(emission.text, style="green" if emission.drafted else ""), end="", soft_wrap=True)
        for _ in islice(plain, _SLICE):
            running = True
    return speculative.result(), plain.result()


def _comparison(speculative: Generation, plain: Generation) -> str:
    ids, expected = (generation[0].outputs[0].token_ids for generation in (speculative, plain))
    same = "the same tokens" if ids == expected else "other tokens after a near tie (docs/exactness.md)"
    ratio = speculative.tokens_per_second / plain.tokens_per_second
    return (
        f"acceptance length {speculative.statistics.acceptance_length:.2f}, "
        f"{speculative.tokens_per_second:.1f} tokens/s; without speculation {same}, "
        f"{plain.tokens_per_second:.1f} tokens/s: {ratio:.2f}x"
    )
