"""Structured outputs compiled for one tokenizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.special_tokens import textless_token_ids
from dflash_trt.checkpoint.token_bytes import token_bytes
from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.lark import Lark, engine_problem, lark, shortened
from dflash_trt.runtime.structured import InvalidForm, StructuredOutputs

_MOST_COMPILED = 32
"""Forms that are kept compiled: clients may send a new one with every request."""
_LIMITS = LLParserLimits(
    # Of one mask, at some 20,000 a millisecond; a form with a lexeme for each character needs a few for each byte of
    # the vocabulary.
    step_max_items=5_000_000,
    # What a mask takes of it depends on the masks before; the number of states does not.
    step_lexer_fuel=2**62,
    verbose_errors=False,
)
"""Counts of what the engine does, never time: whether a form is too ambiguous depends on it and the text alone."""


class GrammarCompiler:
    """Compiles forms for one tokenizer, each once; several threads may ask.

    Args:
        tokenizer: of the engine.
        vocab_size: tokens that logits are of, padding included, which no form allows.
        stop_token_ids: tokens that may follow where a form may end; without any, an output ends where nothing else can
            follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, stop_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._stop_token_ids = sorted(stop_token_ids)
        hidden = {*textless_token_ids(tokenizer), *stop_token_ids}
        self._tokenizer = LLTokenizer(_Vocabulary(token_bytes(tokenizer), vocab_size, hidden))  # type: ignore[arg-type]
        self._compiled: OrderedDict[Hashable, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def mask(self, form: StructuredOutputs | Lark) -> GrammarMask:
        """What holds one output to a form.

        Raises:
            InvalidForm: the form is none, is too large, has a part that cannot be enforced, or no text has it.
        """
        name = "" if isinstance(form, Lark) else "." + form.given[0]
        value = "" if isinstance(form, Lark) else f"; the value is {shortened(form.given[1])}"
        try:
            compiled = self._compiled_form(form)
        except (RecursionError, TypeError, ValueError) as error:
            raise InvalidForm(name, f"{' '.join(str(error).split())}{value}") from None
        mask = GrammarMask(compiled, self.vocab_size, self._stop_token_ids)
        if not mask.allows_any:
            raise InvalidForm(name, f"no text has this form{value}")
        return mask

    def _compiled_form(self, form: StructuredOutputs | Lark) -> LLMatcher:
        key = form if isinstance(form, Lark) else (form.given[0], form.text)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        text = (form if isinstance(form, Lark) else lark(form)).text
        compiled = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=_LIMITS)
        if compiled.is_error():
            raise ValueError(engine_problem(compiled.get_error()))
        with self._lock:
            self._compiled[key] = compiled
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


class _Vocabulary:
    """What the engine asks of a tokenizer; one more token, whose place in a mask says whether the form may end here."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: list[bytes], vocab_size: int, hidden: Collection[int]) -> None:
        self.tokens = [*(texts + [b""] * vocab_size)[:vocab_size], b"end"]
        for token in hidden:
            if token < vocab_size:
                self.tokens[token] = b""
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
