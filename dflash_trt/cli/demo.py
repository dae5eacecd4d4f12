"""`dflash-trt demo`: the whole pipeline on a real small model, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflash_trt.cli.options import device, directory

if TYPE_CHECKING:
    from rich.console import Console

    from dflash_trt.runtime.llm import LLM, Generation

PROMPTS = (
    "Write a Python function that reverses a string.",
    "How do I read a text file line by line in Python?",
    "What is a list comprehension in Python? Give an example.",
)


@click.command()
@click.option(
    "--output_dir",
    type=directory,
    default=Path("engines/smollm2-135m"),
    show_default=True,
    help="Engine directory to write.",
)
@click.option("--max_output_len", type=int, default=96, show_default=True, help="Output tokens of each prompt.")
@device
def demo(output_dir: Path, max_output_len: int, device: str | None) -> None:
    """Build SmolLM2-135M-Instruct with its drafter and decode three prompts, with speculation and without."""
    from rich.console import Console

    from dflash_trt.runtime.llm import LLM

    console = Console(highlight=False)
    _build(output_dir)
    llm = LLM(output_dir, device=device)
    console.print("[green]green[/green]: drafted and accepted; plain: the target's own token\n")
    _generate(llm, PROMPTS[0], 8, llm.executor.block_size)  # the first passes also warm up
    for prompt in PROMPTS:
        console.print(f"[bold]> {prompt}[/bold]")
        speculative = _stream(console, llm, prompt, max_output_len)
        plain = _generate(llm, prompt, max_output_len, 1)
        if speculative[0].outputs[0].token_ids != plain[0].outputs[0].token_ids:
            raise RuntimeError(f"speculation changed the output of {prompt!r}")
        console.print(_comparison(speculative, plain) + "\n")
    console.print(f"Engine: {output_dir}. Try: dflash-trt run --engine_dir {output_dir} --prompt ...")


def _build(output_dir: Path) -> None:
    from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
    from dflash_trt.cli.progress import bytes_progress
    from dflash_trt.engine.build import build_engine, plan_build
    from dflash_trt.engine.config import BuildConfig
    from dflash_trt.examples.smollm2 import DRAFTER, gguf_file

    config = BuildConfig(dtype="float32", max_batch_size=4, max_seq_len=1024)
    target, drafter = open_target(gguf_file()), open_drafter(DRAFTER)
    size = sum(spec.nbytes for specs in plan_build(target, drafter, config) for spec in specs)
    with bytes_progress("building", size) as advance:
        build_engine(target, drafter, config, output_dir, advance)


def _generate(llm: LLM, prompt: str, max_output_len: int, verify_window: int) -> Generation:
    from dflash_trt.runtime.sampling import SamplingParams

    ids = llm.encode_chat([{"role": "user", "content": prompt}])
    return llm.generate([ids], SamplingParams(max_tokens=max_output_len), verify_window=verify_window)


def _stream(console: Console, llm: LLM, prompt: str, max_output_len: int) -> Generation:
    from rich.text import Text

    from dflash_trt.runtime.sampling import SamplingParams

    ids = llm.encode_chat([{"role": "user", "content": prompt}])
    stream = llm.stream([ids], SamplingParams(max_tokens=max_output_len))
    for emission in stream:
        console.print(Text(emission.text, style="green" if emission.drafted else ""), end="", soft_wrap=True)
    console.print()
    return stream.result()


def _comparison(speculative: Generation, plain: Generation) -> str:
    ratio = speculative.tokens_per_second / plain.tokens_per_second
    return (
        f"[dim]identical without speculation; acceptance length {speculative.statistics.acceptance_length:.2f}; "
        f"{speculative.tokens_per_second:.1f} tokens/s, without {plain.tokens_per_second:.1f}: {ratio:.2f}x[/dim]"
    )
