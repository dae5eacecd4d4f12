"""How a token is chosen from logits, the same for target and drafter, greedy and sampled.

The token at position p is argmax(filtered logits / T + Gumbel(seed, p, token id)), at T = 0 the plain argmax. The
choice depends on nothing else, so verification is a comparison, and output is a function of prompt, parameters and
seed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dflash_trt.errors import UserError
from dflash_trt.plugins.noise import gumbel

SEED_LIMIT = 2**63
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """What a caller asks of one prompt. Names and meanings are vLLM's; the defaults are greedy and unlimited."""

    max_tokens: int | None = None
    """Output tokens at most; None: as many as the engine's max_seq_len leaves."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens, and any that tie with the last; 0, or vLLM's -1, keeps all."""
    top_p: float = 1.0
    """Of those, keep the likeliest that together reach probability p."""
    min_p: float = 0.0
    """Keep tokens of at least min_p times the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time that a token is in the output."""
    seed: int | None = None
    """None draws one, which the output reports."""
    n: int = 1
    """Outputs for each prompt, with seeds seed, seed + 1, ..."""
    stop: str | Sequence[str] = ()
    """Texts that end an output, which is cut before them."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end an output, besides the model's own end-of-sequence tokens; they give no text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        # A single text is one stop, not one for each of its characters; lists and None are as good as tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._require_types()
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        hot = 1e-5 <= self.temperature < float("inf")
        _require(hot or self.temperature == 0, "temperature", self.temperature, "0 (greedy), or 1e-5 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        positive = 0 < self.repetition_penalty < float("inf")
        _require(positive, "repetition_penalty", self.repetition_penalty, "finite and above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]")
        _require(1 <= self.n <= 16384, "n", self.n, "1 to 16384")
        _require(self.seed is None or 0 <= self.seed < SEED_LIMIT, "seed", self.seed, "in [0, 2**63)")
        _require(all(self.stop), "stop", self.stop, "without empty texts")

    def _require_types(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "n"):
            value = getattr(self, name)
            integer = isinstance(value, int) and not isinstance(value, bool) and value < SEED_LIMIT
            optional = name in ("max_tokens", "seed") and value is None
            _require(integer or optional, name, value, "an integer below 2**63")
        for name in _NUMBERS:
            _require(isinstance(getattr(self, name), int | float), name, getattr(self, name), "a number")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            _require(all(isinstance(one, kind) for one in value), name, value, f"made of {kind.__name__}")

    def each(self) -> list[SamplingParams]:
        """One set of parameters, with n = 1 and a seed, for every output asked for."""
        first = secrets.randbelow(SEED_LIMIT - self.n) if self.seed is None else self.seed
        return [replace(self, n=1, seed=(first + i) % SEED_LIMIT) for i in range(self.n)]


def _require(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}, it must be {what}")


@dataclass
class Penalties:
    """One request's penalties and the token counts they depend on."""

    params: SamplingParams
    in_prompt: Tensor
    """[V] bool"""
    in_output: Tensor
    """[V] times each token was emitted."""

    @classmethod
    def of(cls, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> Penalties | None:
        """None where the parameters ask for no penalty."""
        if params.repetition_penalty == 1.0 and params.presence_penalty == 0 and params.frequency_penalty == 0:
            return None
        in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
        in_prompt[list(prompt)] = True
        return cls(params, in_prompt, torch.zeros(vocab_size, dtype=torch.int64))

    def record(self, token: int) -> None:
        """Count an emitted token."""
        self.in_output[token] += 1

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """Penalized logits [R, V], where row r comes after the output so far and the first r of `guesses`."""
        counts = self.in_output.repeat(len(logits), 1)
        for row, guess in enumerate(guesses.tolist(), start=1):
            counts[row:, guess] += 1
        counts = counts.to(logits.device)
        seen = self.in_prompt.to(logits.device) | (counts > 0)
        factor = self.params.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - self.params.frequency_penalty * counts
        return logits - self.params.presence_penalty * (counts > 0)


@dataclass(frozen=True)
class Sampling:
    """The parameters of B sequences side by side, each tensor [B]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    penalties: tuple[Penalties | None, ...] = field(repr=False)
    needs_rows: bool
    """A penalty or a filter looks at whole rows of logits; otherwise the best token of each part is all it takes."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], penalties: Sequence[Penalties | None]) -> Sampling:
        """Side by side, for parameters that `SamplingParams.each` gave."""
        filtered = any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params)
        return cls(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float64),
            top_k=torch.tensor([p.top_k for p in params]),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float64),
            seeds=torch.tensor([p.seed for p in params]),
            penalties=tuple(penalties),
            needs_rows=filtered or any(each is not None for each in penalties),
        )


def choose(logits: Tensor, positions: Tensor, sampling: Sampling, guesses: Tensor) -> Tensor:
    """Choose a token for every row.

    Args:
        logits: [B, R, V]
        positions: [B, R] the position that each row's token will have, on the CPU.
        guesses: [B, <R] tokens that are taken to precede rows 1.., for penalties; on the CPU.

    Returns:
        [B, R] token ids on the CPU.
    """
    if any(penalties is not None for penalties in sampling.penalties):
        logits = torch.stack(
            [
                row if penalties is None else penalties.apply(row, guess)
                for row, guess, penalties in zip(logits, guesses, sampling.penalties, strict=True)
            ]
        )
    sampled = (sampling.temperature > 0).nonzero()[:, 0]
    if len(sampled) == 0:
        return logits.argmax(-1).cpu()
    chosen = logits.argmax(-1)
    chosen[sampled] = _draw(logits[sampled], positions[sampled], sampling, sampled)
    return chosen.cpu()


def choose_in_part(logits: Tensor, positions: Tensor, sampling: Sampling, first: int) -> tuple[Tensor, Tensor]:
    """The best token of a part of the vocabulary for every row, under parameters that need no whole rows.

    The best of all parts, the first of them where several are, is what `choose` chooses.

    Args:
        logits: [B, R, P] of tokens `first`..`first` + P - 1.
        positions: [B, R] as for `choose`.

    Returns:
        [B, R] what argmax compares, in float64, and [B, R] token ids, on the device of the logits.
    """
    scores, ids = logits.max(-1)
    scores = scores.double()
    sampled = (sampling.temperature > 0).nonzero()[:, 0]
    if len(sampled) > 0:
        noised = _noised(_tempered(logits[sampled], sampling, sampled), positions[sampled], sampling, sampled, first)
        best = noised.max(-1)
        scores[sampled], ids[sampled] = best.values.double(), best.indices
    return scores, ids + first


def _draw(logits: Tensor, positions: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """Sample [n, R] from logits [n, R, V] of the sequences `rows` [n], all of which have a temperature."""
    scaled = _tempered(logits, sampling, rows)
    device, dtype = scaled.device, scaled.dtype
    min_p = sampling.min_p[rows].to(device, dtype)[:, None, None]
    top_k, top_p = (part[rows].to(device)[:, None, None] for part in (sampling.top_k, sampling.top_p))
    if bool((min_p > 0).any()):
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
    if bool(((top_k > 0) | (top_p < 1)).any()):
        scaled = scaled.masked_fill(scaled < _threshold(scaled, top_k, top_p), float("-inf"))
    return _noised(scaled, positions, sampling, rows).argmax(-1)


def _tempered(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """Logits over temperature, in float32 or wider, of the sequences `rows`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype) / sampling.temperature[rows].to(logits.device, dtype)[:, None, None]


def _noised(scaled: Tensor, positions: Tensor, sampling: Sampling, rows: Tensor, first: int = 0) -> Tensor:
    """[n, R, P] for tokens `first`.., the noise of the sequences `rows` added."""
    device = scaled.device
    seeds = sampling.seeds[rows].to(device)[:, None].expand_as(positions)
    noise: Tensor = gumbel(seeds, positions.to(device), scaled.shape[-1], scaled.dtype, first)
    return scaled + noise


def _threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least value [n, R, 1] that top-k and then top-p keep; -inf where neither cuts.

    Sorting whole vocabularies is slow and rarely needed: the largest 1,024 values settle nearly every row. It is a
    threshold, not a set of indices, so that tokens of equal probability are all kept or all dropped, in whatever order
    a sort has them.
    """
    vocab_size = scaled.shape[-1]
    top_k = torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size))
    threshold, settled = _cut(scaled, scaled.topk(min(1024, vocab_size)).values, top_k, top_p)
    if bool(settled.all()):
        return threshold
    return torch.where(settled, threshold, _cut(scaled, scaled.topk(vocab_size).values, top_k, top_p)[0])


def _cut(scaled: Tensor, largest: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The threshold as far as the `largest` values of each row, in falling order, tell; and whether they tell all."""
    vocab_size, size = scaled.shape[-1], largest.shape[-1]
    within = top_k <= size
    kth = largest.gather(-1, (top_k.clamp(max=size) - 1).expand(*largest.shape[:-1], 1))
    kth = torch.where(within & (top_k < vocab_size), kth, float("-inf"))
    weights = (largest - largest[..., :1]).exp().double() * (largest >= kth)
    mass = (scaled - largest[..., :1]).exp().sum(-1, keepdim=True, dtype=torch.float64)
    total = torch.where(kth > float("-inf"), weights.sum(-1, keepdim=True), mass)
    before = weights.cumsum(-1) - weights
    kept = (largest >= kth) & (before < torch.where(top_p < 1, top_p * total, float("inf")))
    threshold = largest.gather(-1, kept.sum(-1, keepdim=True) - 1)
    cuts = (top_k < vocab_size) | (top_p < 1)
    # Settled when what lies beyond the largest values is certainly dropped.
    settled = ((within | (top_k == vocab_size)) & (largest[..., -1:] < torch.maximum(threshold, kth))) | ~cuts
    return torch.where(cuts, threshold, float("-inf")), settled
