"""What a caller asks of one prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import randbelow

from dflash_trt.errors import UserError
from dflash_trt.runtime.lark import Lark
from dflash_trt.runtime.structured import StructuredOutputs

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
    """Texts that end an output, which is cut before them. Special tokens in them count, though they leave no text."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end an output, besides the model's own end-of-sequence tokens; they give no text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    min_tokens: int = 0
    """Output tokens before one of those, or of `stop_token_ids`, may come, and before a stop text may end."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of tokens, by id: -100 to 100."""
    logprobs: int | None = None
    """Report each token's log-probability and those of so many likeliest ones, 0 to 20; None reports none."""
    structured_outputs: StructuredOutputs | Lark | None = None
    """The form that an output must have."""

    def __post_init__(self) -> None:
        # A single text is one stop, not one for each of its characters; lists and None are as good as tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        self._require_types()
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        hot = 1e-5 <= self.temperature <= 100
        _require(hot or self.temperature == 0, "temperature", self.temperature, "0 (greedy), or in [1e-5, 100]")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        bounded = 0.01 <= self.repetition_penalty <= 100
        _require(bounded, "repetition_penalty", self.repetition_penalty, "in [0.01, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2]")
        _require(1 <= self.n <= 16384, "n", self.n, "1 to 16384")
        _require(self.seed is None or 0 <= self.seed < SEED_LIMIT, "seed", self.seed, "in [0, 2**63)")
        _require(all(self.stop), "stop", self.stop, "without empty texts")
        most = SEED_LIMIT if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= most, "min_tokens", self.min_tokens, "0 to max_tokens")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "0 to 20")
        for token, bias in (self.logit_bias or {}).items():
            _require(-100 <= bias <= 100, f"logit_bias[{token}]", bias, "in [-100, 100]")
        if self.structured_outputs is not None and self.ignore_eos:
            raise UserError("ignore_eos is True, which goes on past the end of structured_outputs; give one")

    def _require_types(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs"):
            value = getattr(self, name)
            integer = isinstance(value, int) and not isinstance(value, bool) and value < SEED_LIMIT
            optional = name in ("max_tokens", "seed", "logprobs") and value is None
            _require(integer or optional, name, value, "an integer below 2**63")
        for name in _NUMBERS:
            _require(isinstance(getattr(self, name), int | float), name, getattr(self, name), "a number")
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            _require(all(isinstance(one, kind) for one in value), name, value, f"made of {kind.__name__}")
        bias = self.logit_bias
        whole = bias is None or all(isinstance(i, int) and isinstance(b, int | float) for i, b in bias.items())
        _require(whole, "logit_bias", bias, "numbers by token id")

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are dropped; greedily chosen, the likeliest passes every filter."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether a penalty is asked for."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def each(self) -> list[SamplingParams]:
        """One set of parameters, with n = 1 and a seed, for every output asked for."""
        first = randbelow(SEED_LIMIT - self.n) if self.seed is None else self.seed
        return [replace(self, n=1, seed=(first + i) % SEED_LIMIT) for i in range(self.n)]


def _require(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}, it must be {what}")
