"""Counter-based Gumbel noise: a pure function of seed, position and token id.

Adding it to logits / T and taking the argmax draws from softmax(logits / T) (the Gumbel-max trick). Since the noise of
a position is known before any pass runs, a token is the same whoever computes it, in whatever batch or block, and a
drafter can guess with the noise that the target will use. Kernels compute it in `noise_kernel.py`.

The bits are Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as `tl.philox` gives
them: key = seed, counter = (token id // 4, position, 0, 0), and of the four words that number token id % 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter and key, all int64 tensors of broadcastable shapes."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words fills 64 bits; int64 wraps to the same bits.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, tokens: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Standard Gumbel noise [..., tokens] for int64 `seeds` and `positions` of one shape [...].

    It is that of tokens `first`, `first` + 1, ...: each rank makes its own.
    """
    key = ((seeds & _WORD)[..., None], ((seeds >> 32) & _WORD)[..., None])
    groups = torch.arange(first // 4, (first + tokens + 3) // 4, device=seeds.device)
    zero = torch.zeros_like(groups)
    words = philox((groups, positions[..., None], zero, zero), key)
    bits = torch.stack(words, dim=-1).flatten(-2)[..., first % 4 : first % 4 + tokens]
    # (bits + 1/2) / 2^32 lies inside (0, 1), but float32 may round it to 1.
    uniform = ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(dtype)
    return noise_of(uniform.clamp_(max=1.0 - torch.finfo(dtype).eps / 2))


def noise_of(uniform: Tensor) -> Tensor:
    """Gumbel noise of numbers inside (0, 1), which are overwritten."""
    # log1p keeps the relative precision of small u, where -log(-log(1 - u)) is largest.
    return uniform.neg_().log1p_().neg_().log_().neg_()
