"""The plugin's kernels on CUDA against their torch references."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.plugins.block_attention import block_attention, block_attention_reference
from dflash_trt.plugins.kv_write import kv_write, kv_write_reference
from dflash_trt.plugins.verify import verify, verify_combine_reference, verify_partial_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
SLOTS, HEADS, KV_HEADS, POSITIONS = 6, 8, 2, 700
LENGTHS = ([0, 1, 37, 600], [16, 1, 7, 16])


def tables(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10_000 ** (-torch.arange(size // 2, device="cuda") / (size // 2))
    angles = torch.arange(POSITIONS, device="cuda")[:, None] * frequencies
    return angles.cos(), angles.sin()


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_caches_are_written_and_read(dtype: torch.dtype, size: int, fp8: bool) -> None:
    """Rows of four sequences in slots out of order: written to the bit, or to a last place of e4m3, then attended to."""
    torch.manual_seed(0)
    kv_len, q_len = map(ints, LENGTHS)
    slots = ints([4, 0, 5, 2])
    keys, values = (torch.randn(4, 16, 1, KV_HEADS, size, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(4, 16, HEADS, size, device="cuda").to(dtype)
    norm = torch.rand(1, size, device="cuda").to(dtype)
    scale = torch.full((1,), 0.02, device="cuda") if fp8 else None
    held = torch.float8_e4m3fn if fp8 else dtype
    filled = torch.randn(1, SLOTS, KV_HEADS, POSITIONS, size, device="cuda").to(held)
    ours, expected = ([filled.clone(), filled.clone()] for _ in range(2))
    given = (keys, values, norm, *tables(size), kv_len, q_len, slots, scale, scale)
    kv_write(*given, *ours, eps=1e-6)
    kv_write_reference(*given, *expected, 1e-6)
    for cache, reference in zip(ours, expected, strict=True):
        # A sum of two products that cancel may be off by a place of either.
        rough = 1e-2 if dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(cache.float(), reference.float(), rtol=0.13 if fp8 else 1e-2, atol=rough)
    attended = (q, norm[0], *tables(size), kv_len, q_len, slots, scale, scale, expected[0][0], expected[1][0])
    for causal, window in ((True, 0), (False, 0), (True, 20), (False, 5)):
        result = block_attention(*attended, causal=causal, window=window, eps=1e-6)
        reference = block_attention_reference(*attended, None, causal=causal, window=window, eps=1e-6)
        for row, count in enumerate(LENGTHS[1]):
            tolerance = 1e-4 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(result[row, :count], reference[row, :count], rtol=tolerance, atol=tolerance)


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """The last slot's rows, a hundred thousand deep, are addressed in 64 bits."""
    slots, heads, positions, size, context = 64, 8, 100_000, 128, 99_000
    shape = (1, slots, heads, positions, size)
    if torch.cuda.mem_get_info()[0] < 2.5 * torch.Size(shape).numel():
        pytest.skip("this GPU has no memory for it")
    torch.manual_seed(0)
    caches = [torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2)]
    for cache in caches:
        cache[0, -1] = torch.randn(heads, positions, size, device="cuda").to(cache.dtype)
    angles = torch.arange(positions, device="cuda")[:, None] / torch.arange(1, size // 2 + 1, device="cuda")
    keys, values = (torch.randn(1, 16, 1, heads, size, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(1, 16, 4 * heads, size, device="cuda").bfloat16()
    scale = torch.full((1,), 0.02, device="cuda")
    where = (angles.cos(), angles.sin(), ints([context]), ints([16]))
    small = [cache[:, -1:].clone() for cache in caches]
    kv_write(keys, values, None, *where, ints([slots - 1]), scale, scale, *caches)
    kv_write_reference(keys, values, None, *where, ints([0]), scale, scale, *small, 0.0)
    for cache, reference in zip(caches, small, strict=True):
        torch.testing.assert_close(cache[0, -1].float(), reference[0, 0].float(), rtol=0.13, atol=1e-2)
        assert not cache[0, :-1].view(torch.uint8).any()
    attended = block_attention(
        q, None, *where, ints([slots - 1]), scale, scale, caches[0][0], caches[1][0], causal=True
    )
    inputs = (q, None, *where, ints([0]), scale, scale, caches[0][0, -1:], caches[1][0, -1:], None)
    expected = block_attention_reference(*inputs, causal=True, window=0, eps=0.0)
    torch.testing.assert_close(attended, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_are_chosen(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 16, 50_000, device="cuda").to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 0.0], device="cuda")
    seeds, first = torch.arange(4, device="cuda"), ints([5, 9, 1000, 3])
    guesses = logits.argmax(-1).roll(1, 1).int()
    draft_len = ints([15, 3, 15, 0])
    noise = (temperature, seeds, first)
    ours = verify(logits, *noise, guesses, draft_len)
    expected = verify_combine_reference(
        *verify_partial_reference(logits, *noise, ints([logits.shape[-1]]), ints([0])), guesses, draft_len
    )
    for result, reference in zip(ours, expected, strict=True):
        assert torch.equal(result, reference)
