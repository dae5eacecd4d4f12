"""Speed and memory of converting to NVFP4: ours on a checkpoint of 8 GB beside `cp`, and beside ModelOpt on a slice.

    python benchmarks/convert.py

Weights only (`w4a16_nvfp4`, ModelOpt's W4A16_NVFP4_CFG), so that both do the same: load, quantize, export. Shapes are
those of Qwen3-8B, values one block of normal noise repeated. Everything runs in a process of its own; times leave out
Python's imports, memory is the process's peak resident set, mapped pages included. Needs 22 GB of disk. Writes the
table of docs/performance.md to stdout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from shapes import qwen3_8b
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.checkpoint.weights import INDEX_FILE
from dflash_trt.examples.smollm2 import gguf_file

SHARD_BYTES = 10**9
NOISE = 1 << 25

OURS = """
import sys, time
from pathlib import Path
from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.conversion.convert import plan_conversion
from dflash_trt.conversion.plan import Formats
started = time.perf_counter()
formats = Formats("w4a16_nvfp4")
plan_conversion(open_target(sys.argv[1]), formats, None, formats, None, Path(sys.argv[2])).run()
print(time.perf_counter() - started)
"""
MODELOPT = """
import copy, sys, time
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM
started = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
mtq.quantize(model, copy.deepcopy(mtq.W4A16_NVFP4_CFG), forward_loop=None)
export_hf_checkpoint(model, export_dir=sys.argv[2])
print(time.perf_counter() - started)
"""


@dataclass(frozen=True)
class Run:
    """One conversion in a process of its own."""

    seconds: float
    peak_bytes: int


def write_checkpoint(directory: Path, config: Qwen3Config) -> int:
    """Write a checkpoint in shards of about 1 GB, never holding more than a tensor of it; its bytes."""
    directory.mkdir(parents=True)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    specs = [TensorSpec(name, torch.bfloat16, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(one.nbytes for one in shards[-1]) + spec.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(spec)
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def values(shard: Sequence[TensorSpec]) -> Iterator[torch.Tensor]:
        for spec in shard:
            count = spec.nbytes // 2
            yield noise.repeat(-(-count // NOISE))[:count].view(spec.shape)

    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    for file, shard in track(list(zip(files, shards, strict=True)), "writing", console=Console(stderr=True)):
        write_safetensors(directory / file, shard, values(shard))
    weight_map = {spec.name: file for file, shard in zip(files, shards, strict=True) for spec in shard}
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(directory)
    save_tokenizer(gguf_file(), directory)
    return sum(spec.nbytes for spec in specs)


def run(program: str, source: Path, output: Path, threads: int) -> Run:
    """Run one of the programs above; its output is removed."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program, str(source), str(output)],
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"converting ended with {process.returncode}")
    shutil.rmtree(output)
    return Run(float(printed.split()[-1]), usage.ru_maxrss * 1024)


def copy(source: Path, output: Path) -> float:
    """Seconds that `cp` takes for a checkpoint."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", source, output], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(output)
    return seconds


@click.command()
@click.option("--threads", default=2, show_default=True, help="Threads of both converters.")
@click.option("--layers", default=14, show_default=True, help="Layers of the whole checkpoint.")
@click.option("--slice_layers", default=4, show_default=True, help="Layers of the slice that ModelOpt is given.")
@click.option("--repeats", default=3, show_default=True, help="Runs of everything, in turn; the fastest counts.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work.  [default: the system's]")
def main(threads: int, layers: int, slice_layers: int, repeats: int, directory: Path | None) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir=directory) as work:
        whole, part, output = Path(work) / "whole", Path(work) / "slice", Path(work) / "output"
        whole_bytes = write_checkpoint(whole, qwen3_8b(layers, vocab_size=151936))
        part_bytes = write_checkpoint(part, qwen3_8b(slice_layers, vocab_size=16384))
        runs: dict[str, list[Any]] = {"cp": [], "ours": [], "ours, slice": [], "ModelOpt, slice": []}
        for _ in track(range(repeats), "measuring", console=Console(stderr=True)):
            runs["cp"].append(copy(whole, output))
            runs["ours"].append(run(OURS, whole, output, threads))
            runs["ours, slice"].append(run(OURS, part, output, threads))
            runs["ModelOpt, slice"].append(run(MODELOPT, part, output, threads))
    report(runs, whole_bytes, part_bytes)


def report(runs: dict[str, list[Any]], whole_bytes: int, part_bytes: int) -> None:
    """The table, in Markdown."""
    fastest = {name: min(found, key=seconds) for name, found in runs.items()}
    click.echo("| | GB | GB/s | peak memory, GB |\n|---|---|---|---|")
    for name, found in fastest.items():
        nbytes = part_bytes if "slice" in name else whole_bytes
        peak = f"{max(one.peak_bytes for one in runs[name]) / 1e9:.2f}" if isinstance(found, Run) else ""
        click.echo(f"| {name} | {nbytes / 1e9:.2f} | {nbytes / 1e9 / seconds(found):.3f} | {peak} |")
    modelopt = seconds(fastest["ModelOpt, slice"]) / seconds(fastest["ours, slice"])
    copied = seconds(fastest["cp"]) / seconds(fastest["ours"])
    click.echo(f"\n{modelopt:.1f} times ModelOpt's speed on the slice; {copied:.2f} of cp's speed on the whole")


def seconds(found: Run | float) -> float:
    """Of a conversion or a copy."""
    return found.seconds if isinstance(found, Run) else found


if __name__ == "__main__":
    main()
