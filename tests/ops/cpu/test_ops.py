"""Whole passes on a CPU: the bits of a row depend on its sequence alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.models.pair import Caches, Pair, load_pair
from dflash_trt.ops.base import LayerCache, Linear, Span
from dflash_trt.ops.cpu.ops import CPUOps
from dflash_trt.ops.eager import eager_ops
from dflash_trt.ops.ranks import Ranks
from dflash_trt.ops.torch_ops import TorchOps
from dflash_trt.quantization.fp8 import quantize_fp8
from dflash_trt.quantization.nvfp4 import quantize_nvfp4
from tests.conftest import TINY

SLOTS, POSITIONS = 4, 128
CPU = torch.device("cpu")


def caches(pair: Pair, dtype: torch.dtype) -> Caches:
    def empty(config: object, layers: Sequence[object]) -> list[LayerCache]:
        shape = (SLOTS, config.num_key_value_heads, POSITIONS, config.head_dim)  # type: ignore[attr-defined]
        return [LayerCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in layers]

    return Caches(empty(pair.target, pair.target_weights.layers), empty(pair.drafter, pair.drafter_weights.layers))


def passed(pair: Pair, held: Caches, slots: list[int], starts: list[int], tokens: Tensor) -> Tensor:
    """Logits of every row of a pass."""
    rows = tokens.shape[1]
    where = Span(torch.tensor(slots), torch.tensor(starts)[:, None] + torch.arange(rows), max(starts) + rows)
    with torch.inference_mode():
        return pair.target_pass(CPUOps(), tokens, torch.arange(rows).expand(len(slots), -1), held, where)


def drafted(pair: Pair, held: Caches, slots: list[int], starts: list[int], anchors: list[int]) -> Tensor:
    size = pair.drafter.block_size
    block = torch.full((len(slots), size), pair.drafter.mask_token_id)
    block[:, 0] = torch.tensor(anchors)
    where = Span(torch.tensor(slots), torch.tensor(starts)[:, None] + torch.arange(size), max(starts) + size)
    with torch.inference_mode():
        return pair.drafter_pass(CPUOps(), block, size - 1, held.drafter, where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_do_not_depend_on_batch_chunk_or_speculation(dtype: torch.dtype) -> None:
    pair = load_pair(
        open_target(TINY / "target"), open_drafter(TINY / "drafter"), positions=POSITIONS, dtype=dtype, device=CPU
    )
    rng = random.Random(0)
    texts = [[rng.randrange(4, 500) for _ in range(90)] for _ in range(SLOTS)]
    whole = caches(pair, dtype)
    expected = [passed(pair, whole, [slot], [0], torch.tensor([text]))[0] for slot, text in enumerate(texts)]
    drafts = [drafted(pair, whole, [slot], [80], [text[80]])[0] for slot, text in enumerate(texts)]

    held, lengths = caches(pair, dtype), [0] * SLOTS
    while min(lengths) < 80:
        slots = rng.sample([slot for slot in range(SLOTS) if lengths[slot] < 80], 1)
        slots += rng.sample([slot for slot in range(SLOTS) if slot not in slots], rng.randint(0, SLOTS - 1))
        starts = [min(lengths[slot], 79) for slot in slots]
        rows = min(rng.choice([1, 1, 2, 3, 5, 8, 13]), 80 - max(starts))
        if rng.random() < 0.5:
            drafted(pair, held, slots, starts, [texts[slot][start] for slot, start in zip(slots, starts, strict=True)])
        part = torch.tensor([texts[slot][start : start + rows] for slot, start in zip(slots, starts, strict=True)])
        logits = passed(pair, held, slots, starts, part)
        for slot, start, of_slot in zip(slots, starts, logits, strict=True):
            assert torch.equal(of_slot, expected[slot][start : start + rows])
            lengths[slot] = start + rng.randint(1, rows)  # the other rows are wrong guesses
    again = drafted(pair, held, list(range(SLOTS)), [80] * SLOTS, [text[80] for text in texts])
    assert torch.equal(again, torch.stack(drafts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_layers_that_quantize_what_they_are_given(algo: str, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 64)
    packed = quantize_fp8(weight, "w") if algo == "FP8" else quantize_nvfp4(weight, "w")
    linear = Linear(packed, torch.randn(48).to(dtype), torch.tensor(0.01))
    x = torch.randn(3, 7, 64).to(dtype)
    y = CPUOps().linear(x, linear)
    torch.testing.assert_close(
        y, TorchOps().linear(x, linear), **({"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {})
    )
    assert y.dtype == dtype and torch.equal(CPUOps().linear(x[1:2, 3:4], linear)[0, 0], y[1, 3])


def test_sums_that_ranks_divide_are_taken_in_float64() -> None:
    linear = Linear(quantize_fp8(torch.randn(48, 640), "w"), None, torch.tensor(0.01))
    x = torch.randn(5, 640)
    assert torch.equal(CPUOps(ranks=Ranks(0, 2)).linear(x, linear), TorchOps().linear(x, linear))


def test_where_kernels_run() -> None:
    assert isinstance(eager_ops(CPU, torch.bfloat16), CPUOps)
    assert not isinstance(eager_ops(CPU, torch.float64), CPUOps)
    assert not isinstance(eager_ops(torch.device("cuda"), torch.bfloat16), CPUOps)
