"""What users of a server get: the adaptive window beside the full one and none, and what the server itself costs.

    python benchmarks/serving.py

One server a pair, with one thread on a core of its own, float32, greedy; users on another core, each with one request
at a time. At every concurrency the three ways to choose the window take turns over the same prompts, which is repeated;
the order turns too. Throughput is told while all users are busy. What else the machine does hits all of them alike:
ratios are of one repeat, their median is given with its 95% bootstrap interval. Prefixes are not reused, so that no way
profits from the one before it. Writes the tables of docs/performance.md to stdout, the plots beside it, and with
--aiperf what that client measures.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import numpy
import torch
from rich.console import Console
from rich.progress import track
from scipy.stats import bootstrap

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.examples.smollm2 import DRAFTER, write_bfloat16_checkpoint
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from load import Load, ask, closed_loop, server
from peers import TINY, held_out
from serving_plots import plot

CONCURRENCY = (1, 2, 4, 8, 16)
LONG_PROMPT = 2000
CHUNK = 256
MODES: dict[str, dict[str, Any]] = {"adaptive": {}, "full": {"verify_window": 8}, "none": {"verify_window": 1}}
"""What a request asks for; both drafters have blocks of 8."""
Loads = dict[int, dict[str, list[Load]]]
"""By concurrency and mode, one a repeat."""


@dataclass(frozen=True)
class Workload:
    """A pair, and what is asked of it."""

    name: str
    engine: Path
    prompts: list[list[int]]
    max_tokens: int
    least: int
    """Requests of a repeat, three a user where that is more."""

    @contextmanager
    def served(self) -> Iterator[httpx.AsyncClient]:
        """A client of its server."""
        with server(self.engine, "--no_prefix_reuse", "--device", "cpu") as address:
            yield httpx.AsyncClient(base_url=address, timeout=None, limits=httpx.Limits(max_connections=None))

    def of(self, users: int) -> list[list[int]]:
        """The prompts of one repeat."""
        return self.some(max(self.least, 3 * users))

    def some(self, count: int) -> list[list[int]]:
        """Prompts in turn."""
        return [self.prompts[index % len(self.prompts)] for index in range(count)]


def workloads(directory: Path) -> list[Workload]:
    """Engines in float32 with room for sixteen users."""
    config = BuildConfig(dtype="float32", max_batch_size=16, max_seq_len=1024, max_num_tokens=CHUNK)
    build_engine(open_target(TINY / "target"), open_drafter(TINY / "drafter"), config, directory / "tiny")
    write_bfloat16_checkpoint(directory / "checkpoint")
    config = BuildConfig(dtype="float32", max_batch_size=16, max_seq_len=LONG_PROMPT + 256, max_num_tokens=CHUNK)
    smollm2 = directory / "smollm2-135m"
    build_engine(open_target(directory / "checkpoint"), open_drafter(DRAFTER), config, smollm2)
    with LLM(directory / "tiny", device="cpu") as llm:
        lines = (TINY / "prompts.txt").read_text().splitlines()
        diaries = [llm.encode_chat([{"role": "user", "content": line}]) for line in lines]
    return [
        Workload("SmolLM2", smollm2, [prompt for prompt, _ in held_out()], max_tokens=24, least=5),
        Workload("tiny", directory / "tiny", diaries, max_tokens=128, least=30),
    ]


async def sweep(workload: Workload, client: httpx.AsyncClient, repeats: int) -> Loads:
    """Every mode in turn at every concurrency; the first time, in which costs are learned, does not count."""
    loads: Loads = {users: {mode: [] for mode in MODES} for users in CONCURRENCY}
    rounds = [(repeat, users) for repeat in range(1 + repeats) for users in CONCURRENCY]
    for repeat, users in track(rounds, f"{workload.name}: {len(MODES)} modes", console=Console(stderr=True)):
        turn = repeat % len(MODES)
        for mode in (*list(MODES)[turn:], *list(MODES)[:turn]):
            load = await closed_loop(
                client, workload.engine.name, workload.of(users), workload.max_tokens, users, **MODES[mode]
            )
            if repeat > 0:
                loads[users][mode].append(load)
    return loads


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 95% bootstrap interval around it."""
    found = bootstrap((numpy.array(ratios),), numpy.median, method="percentile", rng=numpy.random.default_rng(0))
    return statistics.median(ratios), float(found.confidence_interval.low), float(found.confidence_interval.high)


def spread(ratios: Sequence[float]) -> str:
    """The median with its interval, as the tables show it."""
    middle, low, high = interval(ratios)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def table(workload: Workload, loads: Loads) -> None:
    """A row for every concurrency: what each mode reaches, and the adaptive window over the better of the others."""
    click.echo(f"\n{workload.name}, {workload.max_tokens} tokens a request:\n")
    click.echo(
        "| users | " + " | ".join(f"{mode}, tokens/s" for mode in MODES) + " | acceptance length, full | ", nl=False
    )
    click.echo("adaptive over full | adaptive over none | adaptive over the better |")
    click.echo("|---|" + "---|" * (len(MODES) + 4))
    for users, by_mode in loads.items():
        speed = {mode: [load.throughput for load in each] for mode, each in by_mode.items()}
        best = max(("full", "none"), key=lambda mode: statistics.median(speed[mode]))
        cells = [str(users), *(f"{statistics.median(speed[mode]):.1f}" for mode in MODES)]
        cells.append(f"{statistics.median(load.acceptance_length for load in by_mode['full']):.2f}")
        for other in ("full", "none", best):
            cells.append(spread([mine / theirs for mine, theirs in zip(speed["adaptive"], speed[other], strict=True)]))
        click.echo("| " + " | ".join(cells) + " |")


async def overhead(workload: Workload, client: httpx.AsyncClient, llm: LLM, count: int) -> list[float]:
    """Seconds of one user's request over those of `LLM.generate`, prompt by prompt, both with the full window."""
    params = SamplingParams(max_tokens=workload.max_tokens, ignore_eos=True)
    ratios = []
    for prompt in workload.some(count + 1):
        started = time.perf_counter()
        llm.generate([prompt], params, verify_window=8)
        alone = time.perf_counter() - started
        answer = await ask(client, workload.engine.name, prompt, workload.max_tokens, verify_window=8)
        ratios.append(answer.seconds / alone)
    return ratios[1:]


@dataclass(frozen=True)
class Waiting:
    """What a long prompt does to others, in chunk times."""

    alone: float
    """Of a short request: time to its first token with nothing else running."""
    behind: float
    """The same while a long prompt runs."""
    gap: float
    """Of a stream that runs already: the longest time between two of its tokens meanwhile."""


async def wait_behind_a_prompt(workload: Workload, client: httpx.AsyncClient) -> Waiting:
    """A stream is running, a prompt of 2,000 tokens comes, and then a short request."""
    name = workload.engine.name
    long = [token for prompt in workload.prompts for token in prompt][:LONG_PROMPT]
    chunk = (await ask(client, name, long, 1)).first_token / (LONG_PROMPT / CHUNK)
    alone = (await ask(client, name, workload.prompts[0], 1)).first_token
    stream = asyncio.create_task(ask(client, name, workload.prompts[1], 64, verify_window=1))
    await asyncio.sleep(2 * chunk)
    whole = asyncio.create_task(ask(client, name, long, 1))
    await asyncio.sleep(1.5 * chunk)
    behind = (await ask(client, name, workload.prompts[0], 1)).first_token
    assert not whole.done(), "the long prompt was through too soon"
    await whole
    return Waiting(alone / chunk, behind / chunk, (await stream).longest_gap / chunk)


def aiperf(program: Path, address: str, model: str, tokenizer: Path) -> dict[str, Any]:
    """What NVIDIA's client measures of the same server at a concurrency of 4."""
    with tempfile.TemporaryDirectory() as directory:
        options = (
            f"--model {model} --url {address} --tokenizer {tokenizer} --artifact-dir {directory} --endpoint-type chat"
        )
        load = (
            "--streaming --concurrency 4 --request-count 16 --isl 64 --osl 32 --extra-inputs ignore_eos:true --ui none"
        )
        subprocess.run([program, "profile", *options.split(), *load.split()], check=True, stdout=2)
        return dict(json.loads(next(Path(directory).rglob("profile_export_aiperf.json")).read_text()))


async def measure(workload: Workload, repeats: int, program: Path | None, plots: Path) -> None:
    """All of one pair."""
    with workload.served() as client:
        loads = await sweep(workload, client, repeats)
        table(workload, loads)
        plot(loads, workload.name, plots / f"serving-{workload.name.lower()}.svg")
        with LLM(workload.engine, device="cpu") as llm:
            ratios = await overhead(workload, client, llm, 3 * repeats)
        click.echo(f"\nOne user's request over `LLM.generate`: {spread(ratios)}")
        if workload.name == "SmolLM2":
            waits = [await wait_behind_a_prompt(workload, client) for _ in range(repeats)]
            for field in ("alone", "behind", "gap"):
                click.echo(f"{field}, in chunk times: {spread([getattr(wait, field) for wait in waits])}")
        if program is not None:
            found = aiperf(program, str(client.base_url), workload.engine.name, workload.engine)
            for key in ("output_token_throughput", "time_to_first_token", "inter_token_latency", "request_latency"):
                click.echo(f"aiperf {key}: {found[key]['avg']:.1f} {found[key]['unit']}")
        await client.aclose()


@click.command()
@click.option("--repeats", type=click.IntRange(5), default=5, show_default=True)
@click.option("--pair", "names", multiple=True, help="SmolLM2 or tiny; both unless given.")
@click.option("--aiperf", "program", type=click.Path(exists=True, path_type=Path), help="The client's executable.")
@click.option("--plots", type=click.Path(path_type=Path), default=Path("docs"), show_default=True)
def main(repeats: int, names: tuple[str, ...], program: Path | None, plots: Path) -> None:
    """Measure both pairs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory  # costs are learned anew
        for workload in workloads(Path(directory)):
            if not names or workload.name in names:
                asyncio.run(measure(workload, repeats, program, plots))


if __name__ == "__main__":
    main()
