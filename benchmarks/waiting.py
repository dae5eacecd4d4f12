"""What it costs `dflash-trt run` that threads sleep while they wait, and what it saves beside other work.

    python benchmarks/waiting.py

OpenMP's threads wait actively or passively, on a machine that does nothing else and beside a loop that keeps one core
busy. The four take turns, each a process of its own; ratios are of one turn. Writes the table of docs/performance.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.examples.smollm2 import DRAFTER, gguf_file
from peers import TINY

PROMPT = "Write a Python function that reverses a string."
POLICIES = ("default", "active", "passive")


@contextmanager
def busy_loop() -> Iterator[None]:
    """Another process that never waits."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def tokens_per_second(engine: Path, policy: str, threads: int, tokens: int) -> float:
    """Of one run, loading left out; `default` is what OpenMP does where nothing is said."""
    command = [
        str(Path(sys.executable).with_name("dflash-trt")),
        "run",
        "--engine_dir",
        str(engine),
        "--prompt",
        PROMPT,
        "--format",
        "json",
        "--ignore_eos",
    ]
    command += ["--max_output_len", str(tokens), "--device", "cpu"]
    # GOMP_SPINCOUNT as libgomp has it by default is a choice too, so the command line makes none.
    waiting = {"GOMP_SPINCOUNT": "300000"} if policy == "default" else {"OMP_WAIT_POLICY": policy}
    environment = {**os.environ, **waiting, "OMP_NUM_THREADS": str(threads)}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(json.loads(told.stdout)["stats"]["tokens_per_second"])


@click.command()
@click.option("--pair", type=click.Choice(["smollm2", "tiny"]), default="smollm2", show_default=True)
@click.option("--threads", default=2, show_default=True, help="Threads of `run`.")
@click.option("--turns", default=5, show_default=True, help="Runs of each kind.")
@click.option("--tokens", default=32, show_default=True, help="Tokens of each run.")
def main(pair: str, threads: int, turns: int, tokens: int) -> None:
    """Measure and print."""
    target, drafter = (gguf_file(), DRAFTER) if pair == "smollm2" else (TINY / "target", TINY / "drafter")
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        engine = Path(directory) / "engine"
        config = BuildConfig(dtype="float32", max_batch_size=1, max_seq_len=512)
        build_engine(open_target(target), open_drafter(drafter), config, engine)
        tokens_per_second(engine, "passive", threads, tokens)  # brings files into memory, and learns what passes cost
        for _ in range(turns):
            for policy in POLICIES:
                found.setdefault(("quiet", policy), []).append(tokens_per_second(engine, policy, threads, tokens))
            with busy_loop():
                for policy in POLICIES:
                    found.setdefault(("busy", policy), []).append(tokens_per_second(engine, policy, threads, tokens))
    click.echo(f"{pair}, {threads} threads, {tokens} tokens, {turns} turns, medians (least-most)\n")
    click.echo("| | waiting | tokens/s | over passive |\n|---|---|---|---|")
    for (load, policy), speeds in found.items():
        ratios = [one / other for one, other in zip(speeds, found[load, "passive"], strict=True)]
        click.echo(f"| {load} | {policy} | {spread(speeds)} | {spread(ratios)} |")


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
