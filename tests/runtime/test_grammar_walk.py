"""A walk along guesses that goes on from the last one masks what a walk from the beginning does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.runtime.grammar import GrammarCompiler, GrammarMask
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose
from dflash_trt.runtime.structured import StructuredOutputs

FORMS = [
    StructuredOutputs(regex="(ab*c|[a-z ]{0,9}Z?)(é|x)?"),
    StructuredOutputs(grammar='root ::= "x" | "(" root ")"'),
    StructuredOutputs(json_object=True),
    StructuredOutputs(choice=["yes", "yesterday"]),
    StructuredOutputs(regex=r"(.|\n)*"),
]


@pytest.fixture(scope="module")
def compilers(llms: dict[str, LLM]) -> list[GrammarCompiler]:
    """Of the tiny pair's tokenizer, with a padded vocabulary that fills words of 32, and one that does not."""
    llm = llms["tiny"]
    config = llm.engine.config.pretrained_config
    return [GrammarCompiler(llm.tokenizer, size, config.eos_token_ids) for size in (704, 709)]


def from_the_beginning(compiler: GrammarCompiler, form: StructuredOutputs, tokens: list[int]) -> torch.Tensor | None:
    """[V] what may follow; None where the tokens do not fit or have ended."""
    matcher = xgrammar.GrammarMatcher(compiler._compile(form))
    if not all(not matcher.is_terminated() and matcher.accept_token(token) for token in tokens):
        return None
    if matcher.is_terminated():
        return None
    size = compiler._tokens.vocab_size
    bits = xgrammar.allocate_token_bitmask(1, size)
    matcher.fill_next_token_bitmask(bits)
    return ((bits[0, :, None] >> torch.arange(32)) & 1).bool().flatten()[:size]


@given(data=st.data())
@settings(max_examples=60)
def test_any_order_of_rows_guesses_and_tokens(compilers: list[GrammarCompiler], data: st.DataObject) -> None:
    compiler, form = data.draw(st.sampled_from(compilers)), data.draw(st.sampled_from(FORMS))
    size = compiler._tokens.vocab_size
    mask, output, guesses = compiler.mask(form), list[int](), list[int]()

    def drawn_token(before: list[int]) -> int:
        allowed = from_the_beginning(compiler, form, before)
        fitting = [] if allowed is None else allowed.nonzero()[:, 0].tolist()
        return data.draw(st.sampled_from(fitting) if fitting and data.draw(st.integers(0, 5)) else st.integers(0, 699))

    for _ in range(data.draw(st.integers(1, 12))):
        guesses = guesses[: data.draw(st.integers(0, len(guesses)))]
        for _ in range(data.draw(st.integers(0, 3))):
            guesses.append(drawn_token([*output, *guesses]))
        rows = data.draw(st.integers(1, len(guesses) + 1))
        dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        logits = torch.randn(rows, size).to(dtype)
        edited = mask.apply(logits, torch.tensor(guesses, dtype=torch.int64))
        for row in range(rows):
            allowed = from_the_beginning(compiler, form, [*output, *guesses[: len(guesses) - rows + 1 + row]])
            expected = logits[row] if allowed is None else logits[row].masked_fill(~allowed, float("-inf"))
            assert torch.equal(edited[row], expected)
        emitted = guesses[:1] if data.draw(st.booleans()) else [drawn_token(output)]
        allowed = from_the_beginning(compiler, form, output)
        if emitted and allowed is not None and allowed[emitted[0]]:
            mask.record(emitted[0])
            output, guesses = output + emitted, guesses[1:] if emitted == guesses[:1] else []
            following = from_the_beginning(compiler, form, output)
            ends = [*compiler._tokens.stop_token_ids]
            assert mask.is_complete == (following is None or set(following.nonzero()[:, 0].tolist()) == set(ends))


class Counted:
    """A matcher that counts the tokens it is given and the masks it is asked for."""

    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self._matcher = matcher
        self.accepted = self.filled = 0

    def accept_token(self, token: int) -> bool:
        self.accepted += 1
        return self._matcher.accept_token(token)

    def fill_next_token_bitmask(self, bits: torch.Tensor) -> bool:
        self.filled += 1
        return self._matcher.fill_next_token_bitmask(bits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_a_block_is_walked_once(compilers: list[GrammarCompiler], accepted: int) -> None:
    """Drafted place after place, verified, and emitted as far as it is right."""
    compiler = compilers[0]
    matcher: Any = Counted(xgrammar.GrammarMatcher(compiler._compile(StructuredOutputs(regex="[a-z]{200,}"))))
    mask = GrammarMask(matcher, compiler._tokens)
    sampling = Sampling.of([SamplingParams(seed=0)], [(mask,)])
    logits = torch.randn(1, 8, compiler._tokens.vocab_size, dtype=torch.float64)
    guesses = choose(logits[:, :7], torch.arange(7)[None], sampling, None)
    assert (matcher.accepted, matcher.filled) == (6, 7)
    chosen = choose(logits, torch.arange(8)[None], sampling, guesses)
    assert torch.equal(chosen[:, :7], guesses)
    assert (matcher.accepted, matcher.filled) == (7, 8)
    choose(logits[:, :4], torch.arange(4)[None], sampling, guesses[:, :3])
    assert (matcher.accepted, matcher.filled) == (7, 8), "a narrower window takes nothing back"
    for token in guesses[0, :accepted].tolist():
        mask.record(token)
        assert not mask.is_complete
    assert (matcher.accepted, matcher.filled) == (7, 8)
