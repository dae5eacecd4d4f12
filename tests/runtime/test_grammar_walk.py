"""A walk along guesses that goes on from the last one masks what a walk from the beginning does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from dflash_trt.errors import UserError
from dflash_trt.runtime.grammar import GrammarMask
from dflash_trt.runtime.grammar_compiler import GrammarCompiler
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import Sampling, SamplingParams, choose
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.structured import StructuredOutputs
from dflash_trt.runtime.window import FixedWindow

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
    """[V] what may follow, by a matcher of its own; None where the tokens do not fit or have ended."""
    matcher, end = compiler._compiled_form(form).deep_copy(), compiler.vocab_size
    for token in tokens:
        if token in compiler._stop_token_ids or matcher.try_consume_tokens([token]) == 0:
            return None
    bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    allowed = ((bits[:, None] >> torch.arange(8)) & 1).bool().flatten()[: end + 1]
    allowed[compiler._stop_token_ids] = bool(allowed[end])
    return allowed[:end]


@given(data=st.data())
@settings(max_examples=60)
def test_any_order_of_rows_guesses_and_tokens(compilers: list[GrammarCompiler], data: st.DataObject) -> None:
    compiler, form = data.draw(st.sampled_from(compilers)), data.draw(st.sampled_from(FORMS))
    size = compiler.vocab_size
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
            ends = compiler._stop_token_ids
            assert mask.is_complete == (following is None or set(following.nonzero()[:, 0].tolist()) == set(ends))


class Counted:
    """A matcher that counts the tokens it is given and the masks it is asked for."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.accepted = self.filled = 0

    def deep_copy(self) -> Counted:
        return self

    def consume_token(self, token: int) -> bool:
        self.accepted += 1
        return self._matcher.consume_token(token)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.filled += 1
        self._matcher.unsafe_compute_mask_ptr(address, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("accepted", [0, 3, 7])
def test_a_block_is_walked_once(compilers: list[GrammarCompiler], accepted: int) -> None:
    """Drafted place after place, verified, and emitted as far as it is right."""
    compiler = compilers[0]
    matcher: Any = Counted(compiler._compiled_form(StructuredOutputs(regex="[a-z]{200,}")).deep_copy())
    mask = GrammarMask(matcher, compiler.vocab_size, compiler._stop_token_ids)
    sampling = Sampling.of([SamplingParams(seed=0)], [(mask,)])
    logits = torch.randn(1, 8, compiler.vocab_size, dtype=torch.float64)
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


AMBIGUOUS = StructuredOutputs(grammar='root ::= "a" ("c"{1,40} | s)\ns ::= "b" | s s | s s s')
"""After `a`, one `c` after the other takes no effort, and one `b` after the other ever more."""


@pytest.fixture
def strict(compilers: list[GrammarCompiler], monkeypatch: pytest.MonkeyPatch, llms: dict[str, LLM]) -> GrammarCompiler:
    """A compiler that gives up early."""
    limits = LLParserLimits(max_items_in_row=60, verbose_errors=False)
    monkeypatch.setattr("dflash_trt.runtime.grammar_compiler._LIMITS", limits)
    size = llms["tiny"].engine.config.pretrained_config.vocab_size
    return GrammarCompiler(llms["tiny"].tokenizer, size, compilers[0]._stop_token_ids)


def ids_of(llms: dict[str, LLM], text: str) -> list[int]:
    return [llms["tiny"].tokenizer.encode(each, add_special_tokens=False)[-1] for each in text]


@pytest.mark.parametrize("verified", [1, 3, 20])
def test_guesses_that_are_too_ambiguous_change_nothing(
    strict: GrammarCompiler, llms: dict[str, LLM], verified: int
) -> None:
    mask, alone = strict.mask(AMBIGUOUS), strict.mask(AMBIGUOUS)
    logits, none = torch.zeros(1, strict.vocab_size), torch.empty(0, dtype=torch.int64)
    hard = torch.tensor(ids_of(llms, "a" + "b" * 19))
    mask.apply(logits.expand(21, -1), hard)
    assert len(mask._ahead) < len(hard), "the matcher did not give up"
    for emitted in ids_of(llms, "acccc"):
        guesses = torch.tensor([emitted, *hard[1 : 1 + verified].tolist()])
        rows = mask.apply(logits.expand(len(guesses) + 1, -1), guesses)
        assert torch.equal(rows[:1], alone.apply(logits, none))
        mask.record(emitted)
        alone.record(emitted)
        assert mask.is_complete == alone.is_complete


def test_an_output_that_is_too_ambiguous_ends_where_it_does_without_guesses(
    strict: GrammarCompiler, llms: dict[str, LLM]
) -> None:
    ends = []
    for guessed in (0, 1, 5, 30):
        mask, tokens, taken = strict.mask(AMBIGUOUS), ids_of(llms, "a" + "b" * 60), list[list[int]]()
        with pytest.raises(UserError, match="too ambiguous"):
            for at, token in enumerate(tokens):
                guesses = torch.tensor(tokens[at : at + guessed], dtype=torch.int64)
                row = mask.apply(torch.zeros(len(guesses) + 1, strict.vocab_size), guesses)[0]
                taken.append(row.isfinite().nonzero()[:, 0].tolist())
                mask.record(token)
        ends.append(taken)
    assert 2 < len(ends[0]) < 60 and ends == [ends[0]] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_is_too_ambiguous_ends_alike_with_any_window(
    strict: GrammarCompiler, llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Whether a draft is made or not: the same tokens, and the same end."""
    llm = llms["tiny"]
    monkeypatch.setattr(llm, "_compiler", strict)
    form = StructuredOutputs(grammar="root ::= (s s s)+\ns ::= [a-z ] | s s")
    found = []
    for window in (1, 2, llm.executor.max_window):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, structured_outputs=form)
        request = llm.new_request("Once upon a time", params.each()[0], where="here")
        scheduler = Scheduler(llm.executor, FixedWindow(window))
        scheduler.add([request])
        while not scheduler.idle:
            scheduler.step()
        found.append((request.output, request.finish_reason, request.error))
    assert found == [found[0]] * 3
    assert found[0][1] == "error" and "too ambiguous" in str(found[0][2])
