"""One output being made: its tokens, its text, when it ends, and how much of it was drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash_trt.errors import UserError
from dflash_trt.runtime.acceptance import Acceptance
from dflash_trt.runtime.detokenizer import Detokenizer
from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.logprobs import TokenLogprobs
from dflash_trt.runtime.row_edits import row_edits
from dflash_trt.runtime.sampling import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass
class Statistics:
    """Counts of speculation. Sums over requests are sums of fields."""

    output_tokens: int = 0
    verifications: int = 0
    """Passes after the prompt: each emits the target's own token and the guesses it agrees with."""
    draft_tokens: int = 0
    """Guesses that were verified."""
    accepted_tokens: int = 0
    """Guesses that the target agreed with."""
    decoded_tokens: int = 0
    """Output tokens that verifications emitted: all but each output's first."""
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    """Of verifications that had guesses: how many accepted that many of them."""

    @property
    def drafts(self) -> int:
        """Verifications that had guesses."""
        return self.acceptance_histogram.total()

    @property
    def accepted_per_position(self) -> list[int]:
        """Guesses that the target agreed with, by their place in the block."""
        longest = max(self.acceptance_histogram, default=0)
        histogram = self.acceptance_histogram.items()
        return [sum(count for accepted, count in histogram if accepted > place) for place in range(longest)]

    def count_verification(self, guesses: int, accepted: int) -> None:
        """A pass verified so many guesses, and the target agreed with so many."""
        self.verifications += 1
        self.draft_tokens += guesses
        self.accepted_tokens += accepted
        if guesses:
            self.acceptance_histogram[accepted] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verification emitted on average, its own included; None before the first one."""
        return self.decoded_tokens / self.verifications if self.verifications else None

    def add(self, other: Statistics) -> None:
        """Count the other's events too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Request:
    """A prompt and the output that grows from it.

    Args:
        prompt: token ids, at least one.
        params: as `SamplingParams.each` gives them.
        limit: prompt and output tokens together, at most.
        stop_token_ids: tokens that end the output; they are among its ids and give no text.
        grammar: what holds the output to its form.
        priority: requests of lower numbers go first.
        deadline: seconds on the scheduler's clock, when the output ends as it then is; None is never.
        verify_window: tokens that a pass verifies for it, 1 (no speculation) to the block size; None leaves it to the
            scheduler. Output does not depend on it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        limit: int,
        stop_token_ids: Collection[int],
        detokenizer: Detokenizer,
        vocab_size: int,
        grammar: GrammarMask | None = None,
        priority: int = 0,
        deadline: float | None = None,
        verify_window: int | None = None,
    ) -> None:
        self.params = params
        self.verify_window = verify_window
        self.priority = priority
        self.deadline = deadline
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.edits = row_edits(params, prompt, vocab_size, stop_token_ids, grammar)
        """What changes its rows of logits, in order."""
        self.logprobs: list[TokenLogprobs] = []
        """Of each output token, where the parameters ask for them."""
        self.statistics = Statistics()
        self.acceptance: Acceptance | None = None
        """For what chooses the windows of its verifications."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """Why it ended, where the reason is "error"."""
        self.limit = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
        """Prompt and output tokens together, at most."""
        self._stop_token_ids = frozenset(stop_token_ids)
        self._detokenizer = detokenizer
        self._grammar = grammar

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> list[int]:
        """Token ids after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def text(self) -> str:
        """The output's text so far."""
        return self._detokenizer.text

    @property
    def text_length(self) -> int:
        """Characters of its text so far, those held back for a stop text too."""
        return self._detokenizer.length

    @property
    def remaining(self) -> int:
        """Tokens it may still emit."""
        return self.limit - len(self.tokens)

    @property
    def kv_len(self) -> int:
        """Positions in the caches once the prompt is in: the last token enters with the next pass."""
        return len(self.tokens) - 1

    def end_if_late(self, now: float) -> None:
        """End it where its deadline has come."""
        if self.finish_reason is None and self.deadline is not None and now >= self.deadline:
            self.finish_reason = "deadline"

    def fail(self, error: str) -> None:
        """End it for a reason that is one line."""
        self.finish_reason, self.error = "error", error

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> str:
        """Take one more token.

        Returns:
            The text that it completes, which may be empty.
        """
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.statistics.output_tokens += 1
        try:
            for edit in self.edits:
                edit.record(token)
        except UserError as error:
            self.fail(str(error))
            return ""
        if token in self._stop_token_ids:
            self.finish_reason = "stop"
            return self._detokenizer.finish()
        text = self._detokenizer.push(token)
        if self._detokenizer.stopped or (self._grammar is not None and self._grammar.is_complete):
            self.finish_reason = "stop"
        elif self.remaining == 0:
            self.finish_reason = "length"
        return text if self.finish_reason is None else text + self._detokenizer.finish()
