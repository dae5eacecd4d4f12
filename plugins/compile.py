"""`python -m dflash_trt.plugins.compile`: every kernel compiled for a GPU, and what it takes there.

It needs no GPU. Kernels are compiled as TensorRT launches them, and as models make them: BF16 and FP8 caches, heads of
64 and 128, with and without what some models have. Greedy and sampled decoding are one kernel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from dflash_trt.errors import UserError
from dflash_trt.plugins.attention_combine import block_attention_combine_kernel
from dflash_trt.plugins.attention_partial import BlockAttention, block_attention_partial_kernel
from dflash_trt.plugins.attention_shares import filling_programs
from dflash_trt.plugins.gpus import MULTIPROCESSORS, SHARED_MEMORY
from dflash_trt.plugins.kernel import Kernel
from dflash_trt.plugins.kv_write_kernel import kv_write_kernel
from dflash_trt.plugins.verify_kernels import verify_combine_kernel, verify_partial_kernel


@dataclass(frozen=True)
class Row:
    """One kernel in one configuration, compiled."""

    kernel: str
    configuration: str
    registers: int
    """Of a thread."""
    spills: int
    """Bytes of a thread."""
    shared: int
    """Bytes of a block."""
    threads: int
    """Of a block."""
    parameters: list[tuple[str, str]]
    """Name, and type in PTX, in order."""


def configurations(compute_capability: int) -> dict[str, Kernel]:
    """Kernels in configurations that stand for those of real models, by what is particular to them."""
    kernels = {}
    for cache, dtype in {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.items():
        for size in (64, 128):
            name, has_norm = f"{cache} cache, d {size}", size == 128
            kernels[f"kv_write, {name}"] = kv_write_kernel(torch.bfloat16, dtype, size, has_norm=has_norm, eps=1e-6)
            attention = BlockAttention(
                dtype=torch.bfloat16,
                cache_dtype=dtype,
                head_dim=size,
                ratio=4,
                causal=True,
                window=0,
                has_norm=has_norm,
                eps=1e-6,
                most_rows=16,
                compute_capability=compute_capability,
                programs=filling_programs(MULTIPROCESSORS[compute_capability]),
                ahead_of_time=True,
            )
            kernels[f"attention, {name}"] = block_attention_partial_kernel(attention)
        sliding = replace(attention, causal=False, window=4096)
        kernels[f"attention, {name}, sliding block"] = block_attention_partial_kernel(sliding)
    for size, has_sinks in ((64, True), (128, False)):
        combine = block_attention_combine_kernel(torch.bfloat16, size, has_sinks=has_sinks)
        kernels[f"combine, d {size}{', sinks' if has_sinks else ''}"] = combine
    for kind, dtype, tokens in (("bf16", torch.bfloat16, 151936), ("fp16", torch.float16, 32003)):
        kernels[f"verify, {kind}, {tokens} tokens"] = verify_partial_kernel(dtype, tokens)
    return {**kernels, "verify, combined": verify_combine_kernel()}


def rows(compute_capability: int) -> list[Row]:
    """Every configuration compiled for `compute_capability`.

    Raises:
        UserError: there are no kernels for it.
    """
    made = []
    kernels = configurations(compute_capability)
    console = Console(stderr=True)
    for configuration, kernel in track(kernels.items(), "compiling", len(kernels), console=console, transient=True):
        compiled = kernel.compile(compute_capability)
        parameters = list(zip(kernel.parameters, compiled.parameters, strict=True))
        numbers = compiled.registers, compiled.spills, compiled.shared, compiled.threads
        made.append(Row(compiled.name, configuration, *numbers, parameters))
    return made


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--compute_capability", required=True, metavar="smXX", help="Of the GPU, sm103 for example.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What to print on stdout.",
)
def main(compute_capability: str, output_format: str) -> None:
    """Compile every kernel of the plugin and print registers, spills, shared memory, threads and PTX parameters."""
    try:
        number = parse(compute_capability)
        compiled = rows(number)
    except UserError as error:
        click.echo(f"dflash_trt.plugins.compile: {error}", err=True)
        sys.exit(2)
    if output_format == "json":
        click.echo(json.dumps({"compute_capability": compute_capability, "kernels": [asdict(row) for row in compiled]}))
        return
    _print(compiled, number)


def parse(compute_capability: str) -> int:
    """103 of "sm103".

    Raises:
        UserError: it is not one that kernels are compiled for.
    """
    known: dict[str, int] = {f"sm{number}": number for number in SHARED_MEMORY}
    if compute_capability not in known:
        raise UserError(f"--compute_capability is {compute_capability!r}, it must be one of {', '.join(known)}")
    return known[compute_capability]


def _print(compiled: list[Row], compute_capability: int) -> None:
    console = Console()
    right = [Column(name, justify="right") for name in ("registers", "spills", "shared", "threads")]
    title = f"sm{compute_capability}, {SHARED_MEMORY[compute_capability]} KiB of shared memory a block"
    table = Table(Column("kernel", overflow="fold"), *right, title=title, title_justify="left")
    for row in compiled:
        numbers = (row.registers, row.spills, row.shared, row.threads)
        table.add_row(row.configuration, *map(str, numbers))
    console.print(table)
    for name, parameters in {row.kernel: row.parameters for row in compiled}.items():
        told = ", ".join(f"{parameter} {kind}" for parameter, kind in parameters)
        console.print(f"[bold]{name}[/bold]({told})", highlight=False)


if __name__ == "__main__":
    main()
