"""Linear layers of a few rows on this CPU: torch beside our kernels, in the time that copying the weights takes.

    python benchmarks/rows.py

All linear layers of SmolLM2-135M, in turn, so that weights come from memory. Every party runs once in each round, and
the fastest of its rounds counts: what else the machine does makes a round slower, never faster. Ratios are of such
times. Writes the tables of docs/performance.md to stdout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from dflash_trt.ops.cpu.linear import linear
from dflash_trt.quantization.fp8 import FP8Tensor, quantize_fp8
from dflash_trt.quantization.nvfp4 import NVFP4Tensor, quantize_nvfp4
from peers import set_threads

HIDDEN, FFN, KEYS, LAYERS = 576, 1536, 192, 30
SHAPES = [
    (HIDDEN, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (FFN, HIDDEN),
    (FFN, HIDDEN),
    (HIDDEN, FFN),
]

Weight = Tensor | FP8Tensor | NVFP4Tensor
Run = Callable[[], None]


def processor() -> str:
    """Its name, as Linux gives it."""
    names = (
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    return next(names, "an unnamed processor")


def fastest(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Seconds of each, the least of so many rounds in which all take turns, after one that does not count."""
    seconds = {name: float("inf") for name in runs}
    for index in track(range(rounds + 1), console=Console(stderr=True)):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if index:
                seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def multiplication(multiply: Callable[[Tensor, Weight], Tensor], weights: list[Weight], rows: int) -> Run:
    """That many rows through every layer."""
    inputs = {size: torch.randn(rows, size) for size in (HIDDEN, FFN)}
    pairs = [(inputs[shape[1]], weight) for shape, weight in zip(SHAPES * LAYERS, weights, strict=True)]

    def run() -> None:
        for x, weight in pairs:
            multiply(x, weight)

    return run


def copying(weights: list[Tensor]) -> Run:
    """All weights to another place."""
    copies = [torch.empty_like(weight) for weight in weights]

    def run() -> None:
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight)

    return run


@click.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=30, show_default=True)
@click.option("--rows", "counts", default="1,2,4,8,16,32,128", show_default=True, help="Rows, with commas.")
def main(threads: int, rounds: int, counts: str) -> None:
    """Measure and print."""
    set_threads(threads)
    weights = [0.05 * torch.randn(shape) for shape in SHAPES * LAYERS]
    formats: dict[str, list[Weight]] = {
        "float32": list(weights),
        "BF16": [weight.bfloat16() for weight in weights],
        "FP8": [quantize_fp8(weight, "weight") for weight in weights],
        "NVFP4": [quantize_nvfp4(weight, "weight") for weight in weights],
    }
    columns = [int(count) for count in counts.split(",")]
    with torch.inference_mode():
        runs = {"copy": copying(weights)}
        for rows in columns:
            runs[f"torch {rows}"] = multiplication(F.linear, list(weights), rows)
            runs |= {f"{name} {rows}": multiplication(linear, held, rows) for name, held in formats.items()}
        seconds = fastest(runs, rounds)
    size = sum(weight.nbytes for weight in weights)
    click.echo(
        f"{processor()}, {threads} threads: copying {size / 1e6:.0f} MB takes {1e3 * seconds['copy']:.1f} ms; "
        f"times over that, and torch's over ours in brackets\n"
    )
    click.echo("| rows | torch, float32 | " + " | ".join(formats) + " |")
    click.echo("|---|---|" + "---|" * len(formats))
    for rows in columns:
        torch_seconds = seconds[f"torch {rows}"]
        cells = [f"{torch_seconds / seconds['copy']:.2f}"]
        for name in formats:
            ours = seconds[f"{name} {rows}"]
            cells.append(f"{ours / seconds['copy']:.2f} ({torch_seconds / ours:.2f})")
        click.echo(f"| {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
