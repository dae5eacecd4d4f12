"""The plugin's kernels on this machine's GPU: how much of its memory bandwidth they reach.

    python benchmarks/kernels.py

Attention and verification read far more than they compute, so the measure is bytes that must be read and written over
time, as a fraction of what copying a large tensor reaches in the same run. Every kernel is held to its torch reference
on smaller sizes first. Needs a CUDA device; takes a minute. Writes the table of docs/performance.md to stdout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from dflash_trt.plugins.block_attention import block_attention, block_attention_reference
from dflash_trt.plugins.verify import verify, verify_combine_reference, verify_partial_reference

BLOCK, HEADS, KV_HEADS, SIZE = 16, 32, 8, 128
VOCABULARY = 151936
REPEATS, WARMUP = 30, 5
CACHE_FLUSH = 1 << 28
"""Bytes read between repeats: more than any second-level cache holds."""


@dataclass(frozen=True)
class Attention:
    """One measurement of `block_attention`."""

    sequences: int
    context: int
    dtype: torch.dtype


CASES = [
    Attention(sequences, context, dtype)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    for sequences, context in ((64, 8192), (1, 100_000))
]


def seconds(run: Callable[[], object]) -> float:
    """The median of a few runs on cold caches, by the GPU's clock; captured, so that no launch is waited for."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.zeros(CACHE_FLUSH, dtype=torch.uint8, device="cuda")
    times = []
    for repeat in range(WARMUP + REPEATS):
        flush.amax()  # read, so that nothing is left to be written back
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= WARMUP:
            times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """Bytes a second, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: destination.copy_(source))


class Inputs:
    """What `block_attention` takes, random, for a block of every sequence at the end of its context."""

    def __init__(self, case: Attention) -> None:
        positions, slots = case.context + BLOCK, case.sequences
        shape = (slots, KV_HEADS, positions, SIZE)
        self.q = torch.randn(slots, BLOCK, HEADS, SIZE, device="cuda").bfloat16()
        self.q_norm = torch.ones(SIZE, device="cuda").bfloat16()
        angles = torch.arange(positions, device="cuda")[:, None] / 10_000 ** (
            torch.arange(SIZE // 2, device="cuda") / 64
        )
        self.cos, self.sin = angles.cos(), angles.sin()
        self.kv_len = torch.full((slots,), case.context, dtype=torch.int32, device="cuda")
        self.q_len = torch.full((slots,), BLOCK, dtype=torch.int32, device="cuda")
        self.slots = torch.randperm(slots, device="cuda").int()
        quantized = case.dtype == torch.float8_e4m3fn
        self.k_scale = self.v_scale = torch.full((1,), 0.01, device="cuda") if quantized else None
        self.caches = [self._cache(shape, case.dtype) for _ in range(2)]

    def _cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        cache = torch.empty(shape, dtype=dtype, device="cuda")
        for slot in cache:  # random numbers of all slots at once would take twice the memory
            slot.copy_(torch.randn(slot.shape, device="cuda"))
        return cache

    def run(self) -> Tensor:
        """The kernels."""
        return block_attention(*self._arguments(), causal=True, eps=1e-6)

    def reference(self) -> Tensor:
        """The same in torch."""
        return block_attention_reference(*self._arguments(), None, causal=True, window=0, eps=1e-6)

    def _arguments(self) -> tuple[Tensor | None, ...]:
        lengths = (self.kv_len, self.q_len, self.slots)
        return (self.q, self.q_norm, self.cos, self.sin, *lengths, self.k_scale, self.v_scale, *self.caches)

    @property
    def bytes(self) -> int:
        """What must be read and written: both caches, the queries and the output."""
        return sum(cache.nbytes for cache in self.caches) + 2 * self.q.nbytes


class Logits:
    """What `verify` takes, random."""

    def __init__(self, sequences: int, *, sampled: bool) -> None:
        self.logits = torch.randn(sequences, BLOCK, VOCABULARY, device="cuda").bfloat16()
        self.temperature = torch.full((sequences,), 0.8 if sampled else 0.0, device="cuda")
        self.seeds = torch.arange(sequences, device="cuda")
        self.first = torch.full((sequences,), 1000, dtype=torch.int32, device="cuda")
        self.tokens = torch.randint(0, VOCABULARY, (sequences, BLOCK), dtype=torch.int32, device="cuda")
        self.draft_len = torch.full((sequences,), BLOCK - 1, dtype=torch.int32, device="cuda")

    def run(self) -> tuple[Tensor, ...]:
        """The kernels."""
        return verify(self.logits, *self._noise(), self.tokens, self.draft_len)

    def reference(self) -> tuple[Tensor, ...]:
        """The same in torch."""
        ends = torch.tensor([VOCABULARY], device="cuda"), torch.tensor([0], device="cuda")
        return verify_combine_reference(
            *verify_partial_reference(self.logits, *self._noise(), *ends), self.tokens, self.draft_len
        )

    def _noise(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.temperature, self.seeds, self.first


@click.command()
def main() -> None:
    """Check, measure, and print a table."""
    if not torch.cuda.is_available():
        raise click.UsageError("this machine has no CUDA device")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copying reaches {bandwidth / 1e12:.2f} TB/s")
    print("| kernel | sequences | context | cache | us | of copying |\n|---|---|---|---|---|---|")
    for case in CASES:
        small = Inputs(Attention(2, min(case.context, 500), case.dtype))
        torch.testing.assert_close(small.run().float(), small.reference().float(), rtol=2e-2, atol=2e-2)
        inputs = Inputs(case)
        taken = seconds(inputs.run)
        reached = inputs.bytes / taken / bandwidth
        name = str(case.dtype).removeprefix("torch.")
        print(f"| block_attention | {case.sequences} | {case.context} | {name} | {taken * 1e6:.0f} | {reached:.0%} |")
        del inputs
    for sampled in (False, True):
        small_logits = Logits(2, sampled=sampled)
        for ours, expected in zip(small_logits.run(), small_logits.reference(), strict=True):
            torch.testing.assert_close(ours, expected)
        logits = Logits(64, sampled=sampled)
        taken = seconds(logits.run)
        reached = logits.logits.nbytes / taken / bandwidth
        print(f"| verify, {'sampled' if sampled else 'greedy'} | 64 | - | - | {taken * 1e6:.0f} | {reached:.0%} |")


if __name__ == "__main__":
    main()
