"""Decoding speed on this machine, ours beside transformers' and the authors', and acceptance on held-out prompts.

    python benchmarks/decoding.py

Float32, batch 1, greedy, one process. Every prompt is decoded by every party in turn before the next prompt, so what
else the machine does hits all of them alike; ratios are of one prompt's times, and their median is given with its
quartiles. Writes the tables of docs/performance.md to stdout.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from dflash.model import dflash_generate
from rich.console import Console
from rich.progress import track

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.examples.smollm2 import DRAFTER, write_bfloat16_checkpoint
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from peers import (
    TINY,
    authors_drafter,
    held_out,
    set_threads,
    transformers_target,
)

Decode = Callable[[list[int], int], list[int]]
"""Prompt and number of tokens to the tokens."""


def engine(target: Path, drafter: Path, directory: Path) -> LLM:
    """A float32 engine for one sequence."""
    config = BuildConfig(dtype="float32", max_batch_size=1, max_seq_len=1024)
    build_engine(open_target(target), open_drafter(drafter), config, directory)
    return LLM(directory, device="cpu")


def ours(llm: LLM, window: int) -> Decode:
    """Our loop with a fixed verify window."""

    def decode(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        return llm.generate([prompt], params, verify_window=window)[0].outputs[0].token_ids

    return decode


def peers(target: Path, drafter: Path) -> dict[str, Decode]:
    """transformers' `generate` and the authors' `dflash_generate` on the same checkpoints."""
    model, draft_model = transformers_target(target), authors_drafter(drafter)

    def plain(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        return list(output[0, len(prompt) :].tolist())

    def authors(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        return list(dflash_generate(draft_model, model, ids, count, None)[0, len(prompt) :].tolist())

    return {"transformers": plain, "dflash 0.1.0": authors}


def measure(decoders: dict[str, Decode], prompts: Sequence[list[int]], count: int) -> dict[str, list[float]]:
    """Seconds of every decoder for every prompt, after one round to warm up; outputs must agree."""
    seconds: dict[str, list[float]] = {name: [] for name in decoders}
    for decode in decoders.values():
        decode(prompts[0], 8)
    for prompt in track(prompts, console=Console(stderr=True)):
        outputs = {}
        for name, decode in decoders.items():
            started = time.perf_counter()
            outputs[name] = decode(prompt, count)
            seconds[name].append(time.perf_counter() - started)
        first = next(iter(outputs.values()))
        for name, output in outputs.items():
            if output != first:
                at = next(i for i, (a, b) in enumerate(zip(output, first, strict=True)) if a != b)
                click.echo(f"{name} differs from token {at} on (float32 rounding)", err=True)
    return seconds


def table(seconds: dict[str, list[float]], count: int, baselines: Sequence[str]) -> None:
    """A Markdown table: tokens/s, and speed over each baseline with quartiles."""
    click.echo("| | tokens/s | " + " | ".join(f"over {name}" for name in baselines) + " |")
    click.echo("|---|---|" + "---|" * len(baselines))
    for name, times in seconds.items():
        cells = [f"{count / statistics.median(times):.1f}"]
        for baseline in baselines:
            ratios = [theirs / mine for theirs, mine in zip(seconds[baseline], times, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cells.append(f"{middle:.2f} ({low:.2f}-{high:.2f})")
        click.echo(f"| {name} | " + " | ".join(cells) + " |")
    click.echo()


def acceptance(llm: LLM) -> None:
    """Acceptance length over all held-out prompts, and whether the known answers come out."""
    rows = held_out()
    same, total = 0, []
    for prompt, answer in track(rows, console=Console(stderr=True)):
        generation = llm.generate([prompt], SamplingParams(max_tokens=len(answer)))
        same += generation[0].outputs[0].token_ids == answer
        total.append(generation.statistics)
    decoded, verifications = (sum(getattr(one, name) for one in total) for name in ("decoded_tokens", "verifications"))
    click.echo(
        f"Held-out prompts: {same} of {len(rows)} answers equal those of transformers token for token; "
        f"acceptance length {decoded / verifications:.2f} ({decoded} tokens in {verifications} verifications).\n"
    )


def context_share(llm: LLM) -> None:
    """What writing the drafter's context costs a target pass of one token."""
    from dflash_trt.models import dflash

    prompt = held_out()[0][0]
    write, spent = dflash.write_context, [0.0]

    def timed(*arguments: object) -> None:
        started = time.perf_counter()
        write(*arguments)  # type: ignore[arg-type]
        spent[0] += time.perf_counter() - started

    dflash.write_context = timed  # type: ignore[assignment]
    try:
        started = time.perf_counter()
        ours(llm, 1)(prompt, 64)
        total = time.perf_counter() - started
    finally:
        dflash.write_context = write
    click.echo(f"Writing the drafter's context takes {spent[0] / total:.1%} of plain decoding.\n")


@click.command()
@click.option("--threads", default=2, show_default=True, help="Threads of every party.")
@click.option("--prompts", "prompt_count", default=10, show_default=True, help="Prompts of each comparison.")
@click.option("--tokens", default=96, show_default=True, help="Tokens of each answer.")
def main(threads: int, prompt_count: int, tokens: int) -> None:
    """Measure and print."""
    set_threads(threads)
    click.echo(f"{threads} threads, {prompt_count} prompts, {tokens} tokens each, medians (quartiles)\n")
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "SmolLM2-135M-Instruct"
        write_bfloat16_checkpoint(target)
        llm = engine(target, DRAFTER, Path(directory) / "smollm2")
        windows = {f"ours, window {window}": ours(llm, window) for window in (2, 3, 4, 8)}
        decoders = {**peers(target, DRAFTER), "ours, plain": ours(llm, 1), **windows}
        prompts = [prompt for prompt, _ in held_out()[:prompt_count]]
        click.echo("SmolLM2-135M-Instruct\n")
        table(measure(decoders, prompts, tokens), tokens, ["transformers", "dflash 0.1.0", "ours, plain"])
        acceptance(llm)
        context_share(llm)

        tiny = engine(TINY / "target", TINY / "drafter", Path(directory) / "tiny")
        texts = (TINY / "prompts.txt").read_text().splitlines()[:prompt_count]
        chats = [tiny.encode_chat([{"role": "user", "content": text}]) for text in texts]
        decoders = {
            **peers(TINY / "target", TINY / "drafter"),
            "ours, plain": ours(tiny, 1),
            "ours, DFlash": ours(tiny, 8),
        }
        click.echo("The tiny pair\n")
        table(measure(decoders, chats, tokens), tokens, ["transformers", "dflash 0.1.0", "ours, plain"])


if __name__ == "__main__":
    main()
