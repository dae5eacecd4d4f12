"""The noise that makes sampling repeatable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dflash_trt.plugins.noise import gumbel, philox

# Known answers of the Random123 library, kat_vectors, philox4x32 10.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == words


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_is_standard_gumbel(dtype: torch.dtype) -> None:
    noise = gumbel(torch.arange(20), torch.arange(20), 5000, dtype)
    assert noise.shape == (20, 5000) and noise.dtype == dtype
    assert bool(torch.isfinite(noise).all())
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 0.01


def test_depends_on_seed_position_and_token_only() -> None:
    seeds, positions = torch.tensor([[1, 1], [2**62 + 7, 2**62 + 7]]), torch.tensor([[5, 6], [5, 6]])
    together = gumbel(seeds, positions, 1001, torch.float64)
    for row in range(2):
        for column in range(2):
            alone = gumbel(seeds[row, column], positions[row, column], 998, torch.float64)
            assert torch.equal(alone, together[row, column, :998])
    assert len({float(value) for value in together[..., 0].flatten()}) == 4


def test_extreme_words_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest word, which no sample of bearable size would meet."""
    for word in (0, 0xFFFFFFFF):
        monkeypatch.setattr(
            "dflash_trt.plugins.noise.philox", lambda c, k, word=word: tuple(torch.full((1, 1), word) for _ in range(4))
        )
        for dtype in (torch.float32, torch.float64):
            noise = gumbel(torch.tensor([0]), torch.tensor([0]), 4, dtype)
            assert bool(torch.isfinite(noise).all())
            assert float(noise.abs().max()) < 24


@given(first=st.integers(0, 200), tokens=st.integers(1, 50))
def test_a_part_of_a_vocabulary_has_the_noise_of_the_whole(first: int, tokens: int) -> None:
    seeds, positions = torch.tensor([1, 2**62 + 5]), torch.tensor([3, 70000])
    whole = gumbel(seeds, positions, 300, torch.float32)
    assert torch.equal(gumbel(seeds, positions, tokens, torch.float32, first), whole[:, first : first + tokens])
