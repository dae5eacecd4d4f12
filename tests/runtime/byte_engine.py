"""The grammar engine with a token for each byte, so that what a grammar accepts can be told without a tokenizer."""

from __future__ import annotations

import random

import numpy
from llguidance import LLMatcher, LLTokenizer

from dflash_trt.runtime.grammar_compiler import _LIMITS
from dflash_trt.runtime.lark import Lark

END = 256


class _Bytes:
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"end")


TOKENIZER = LLTokenizer(_Bytes())  # type: ignore[arg-type]


def matcher_of(grammar: Lark) -> LLMatcher:
    """A matcher at the beginning of a grammar."""
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar.text), log_level=0, limits=_LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def is_accepted(grammar: Lark | LLMatcher, text: str) -> bool:
    """The grammar has this text."""
    matcher = matcher_of(grammar) if isinstance(grammar, Lark) else grammar
    tokens = list(text.encode())
    fitting = matcher.try_consume_tokens(tokens)
    accepted = fitting == len(tokens) and matcher.is_accepting()
    matcher.rollback(fitting)
    return accepted


def walked(matcher: LLMatcher, draw: random.Random, longest: int = 150) -> str | None:
    """A text of the grammar, drawn at random with a liking for its end; None where it does not end soon.

    Raises:
        AssertionError: the grammar has led to where nothing may follow.
    """
    matcher, found = matcher.deep_copy(), list[int]()
    while len(found) < longest:
        bits = numpy.frombuffer(matcher.compute_bitmask(), dtype=numpy.uint8)
        assert not matcher.is_error(), f"nothing may follow {bytes(found)!r}"
        allowed = set(numpy.unpackbits(bits, bitorder="little").nonzero()[0].tolist())
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.4):
            return bytes(found).decode()
        closing = sorted(allowed & set(b'"]}'))
        others = sorted(allowed - {END})
        found.append(draw.choice(closing) if closing and draw.random() < 0.4 else draw.choice(others))
        assert matcher.consume_token(found[-1])
    return None
