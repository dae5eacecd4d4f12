"""Outputs held to a form: which tokens may follow, along the guesses of a draft too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from itertools import accumulate
from threading import Lock

import numpy
import torch
import xgrammar
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dflash_trt.errors import UserError
from dflash_trt.runtime.kept import common_prefix
from dflash_trt.runtime.structured import MOST_WHITESPACE, StructuredOutputs

_CACHE_BYTES = 256 * 2**20
"""For compiled forms: clients may send a new one with every request."""
_MOST_TEXT = 2**17
"""Characters of a form: of 20,000 alternatives, which are more, one takes seconds to compile."""
_MOST_NESTED = 64
"""Objects and lists of a schema that are in one another; twice as many take ten times as long to compile."""
_SLOWEST = 0.2
"""Seconds of a processor that one place may take: an ambiguous form takes ever longer, and all requests wait for it."""
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"')
_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: |Check failed: \(.*?\) is false: ")
"""Time, source file and condition before what xgrammar has to say."""


class GrammarCompiler:
    """Compiles forms for one tokenizer, each once; several threads may ask, and take turns.

    Args:
        tokenizer: of the engine.
        vocab_size: tokens that logits are of, padding included, which no form allows.
        stop_token_ids: tokens that may follow where a form may end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self._tokens = _tokens_of(tokenizer, vocab_size, stop_token_ids)
        self._compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=2, cache_limit_bytes=_CACHE_BYTES)
        self._turn = Lock()

    def mask(self, form: StructuredOutputs) -> GrammarMask:
        """What holds one output to a form.

        Raises:
            UserError: the form is none, is too large, or no text has it.
        """
        name, value = form.given
        try:
            _require_size(form)
            with self._turn:
                compiled = self._compile(form)
            mask = GrammarMask(xgrammar.GrammarMatcher(compiled), self._tokens)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(_WHERE.sub("", str(error), count=2).split())
            raise UserError(f"structured_outputs.{name}: {reason}; the value is {_shortened(value)}") from error
        if not mask.allows_any:
            raise UserError(f"structured_outputs.{name}: no text has this form; the value is {_shortened(value)}")
        return mask

    def _compile(self, form: StructuredOutputs) -> xgrammar.CompiledGrammar:
        if form.json is not None:
            return self._compile_schema(form.json if isinstance(form.json, str) else _json(form.json))
        if form.regex is not None:
            return self._compiler.compile_regex(form.regex)
        if form.choice is not None:
            # JSON's escapes are EBNF's, but for those of pairs of surrogates.
            return self._compiler.compile_grammar("root ::= " + " | ".join(map(_json, form.choice)))
        if form.grammar is not None:
            return self._compiler.compile_grammar(form.grammar)
        return self._compile_schema('{"type": "object"}')

    def _compile_schema(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(schema, max_whitespace_cnt=MOST_WHITESPACE)


class GrammarMask:
    """Makes tokens impossible that would take one request's output out of its form.

    The matcher goes ahead of the output along the guesses, and stays there: drafting, which asks for one place after
    the other, verification, and what is then emitted of it share one walk, and only what turned out otherwise is taken
    back.

    Args:
        matcher: at the beginning of the form.
        tokenizer: its own.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, tokenizer: xgrammar.TokenizerInfo) -> None:
        self._matcher = matcher
        self._vocab_size = tokenizer.vocab_size
        self._stop_token_ids = tokenizer.stop_token_ids
        self._ahead: list[int] = []
        """Guesses after the output that the matcher has accepted."""
        self._masks: list[Tensor] = []
        """[V] bool, whether each token may follow the output, one guess, two, ...; of each place once it is reached."""
        self._is_too_slow = False

    @property
    def allows_any(self) -> bool:
        """Whether any token may come next."""
        self._reach()
        return bool(self._masks[0].any())

    @property
    def is_complete(self) -> bool:
        """Whether nothing may come next but an end."""
        self._reach()
        if not self._masks:
            return True
        ends = int(self._masks[0][self._stop_token_ids].count_nonzero())
        return ends > 0 and int(self._masks[0].count_nonzero()) == ends

    def apply(self, logits: Tensor, guesses: Tensor) -> Tensor:
        """See `RowEdit.apply`. Rows after a guess that does not fit are left as they are: none is looked at."""
        self._walk(guesses.tolist())
        first = len(guesses) - len(logits) + 1
        masks = self._masks[first : len(guesses) + 1]
        masks += [torch.ones(self._vocab_size, dtype=torch.bool)] * (len(logits) - len(masks))
        return torch.where(torch.stack(masks).to(logits.device), logits, float("-inf"))

    def record(self, token: int) -> None:
        """Take an emitted token.

        Raises:
            UserError: it does not fit, or what may follow takes too long to find out.
        """
        if self._is_too_slow:
            raise UserError(f"structured_outputs: is too ambiguous; one token took more than {_SLOWEST:g} s to check")
        if self._ahead[:1] != [token]:
            self._turn_back(0)
            if not self._accept(token):
                raise UserError(f"the output left its form with token {token}")
        del self._ahead[0], self._masks[:1]

    def _walk(self, guesses: list[int]) -> None:
        """Go along guesses as far as they fit, from where they leave the walk before."""
        self._reach()
        shared = common_prefix(self._ahead, guesses)
        if shared == len(guesses):
            return
        self._turn_back(shared)
        for guess in guesses[shared:]:
            if not self._accept(guess):
                return
            self._reach()

    def _turn_back(self, length: int) -> None:
        self._matcher.rollback(len(self._ahead) - length)
        del self._ahead[length:], self._masks[length + 1 :]

    def _accept(self, token: int) -> bool:
        if self._matcher.is_terminated():
            return False
        started = time.thread_time()
        accepted = self._matcher.accept_token(token)
        self._notice(started)
        if accepted:
            self._ahead.append(token)
        return accepted

    def _reach(self) -> None:
        """Note what may come where the matcher is, once, and nothing after an end."""
        if len(self._masks) == len(self._ahead) and not self._matcher.is_terminated():
            bits, started = xgrammar.allocate_token_bitmask(1, self._vocab_size), time.thread_time()
            self._matcher.fill_next_token_bitmask(bits)
            self._notice(started)
            # Several times faster than xgrammar's own kernel for CPUs, which has no float64 either.
            allowed = numpy.unpackbits(bits.numpy().view(numpy.uint8)[0], count=self._vocab_size, bitorder="little")
            self._masks.append(torch.from_numpy(allowed).bool())

    def _notice(self, started: float) -> None:
        self._is_too_slow |= time.thread_time() - started > _SLOWEST


def _tokens_of(
    tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_token_ids: Collection[int]
) -> xgrammar.TokenizerInfo:
    """The vocabulary, its special tokens without the text that they look like: no form has it."""
    stops = sorted(stop_token_ids)
    detected = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
    texts = [""] * vocab_size
    for text, token in tokenizer.get_vocab().items():
        if token < vocab_size:
            texts[token] = text
    for token in {*tokenizer.all_special_ids, *stops}:
        if token < vocab_size:
            texts[token] = ""
    return xgrammar.TokenizerInfo(
        texts,
        detected.vocab_type,
        vocab_size=vocab_size,
        stop_token_ids=stops,
        add_prefix_space=detected.add_prefix_space,
    )


def _require_size(form: StructuredOutputs) -> None:
    """Refuse what would take long to compile.

    Raises:
        ValueError: it would.
    """
    name, value = form.given
    text = value if isinstance(value, str) else _json(value)
    if len(text) > _MOST_TEXT:
        raise ValueError(f"has {len(text)} characters, it may have {_MOST_TEXT}")
    if name == "json":
        nested = list(accumulate((part in "[{") - (part in "]}") for part in _TEXT.sub("", text)))
        if max(nested, default=0) > _MOST_NESTED:
            raise ValueError(f"has {max(nested)} objects and lists in one another, it may have {_MOST_NESTED}")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
