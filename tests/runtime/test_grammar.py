"""Outputs held to a form, the same with and without speculation."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AddedToken

from dflash_trt.errors import UserError
from dflash_trt.runtime.grammar_compiler import GrammarCompiler
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.structured import MOST_WHITESPACE, StructuredOutputs
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import TINY, build_pair

FORMS = [
    (StructuredOutputs(regex="[a-f]{3,5}"), "[a-f]{3,5}"),
    (StructuredOutputs(choice=["yes", 'no\n"\\é']), 'yes|no\n"\\\\é'),
    (StructuredOutputs(grammar='root ::= "x" | "(" root ")"'), r"\(*x\)*"),
    (StructuredOutputs(json={"type": "boolean"}), "true|false"),
    (StructuredOutputs(choice=["\U0001f600"]), "\U0001f600"),
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("form", "expected"), FORMS, ids=lambda form: getattr(form, "given", ("",))[0])
def test_output_has_its_form_with_and_without_speculation(
    llms: dict[str, LLM], form: StructuredOutputs, expected: str, temperature: float
) -> None:
    llm = llms["tiny"]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, structured_outputs=form, logprobs=2)
    alone, drafted = (
        llm.generate(["Once upon a time"], params, verify_window=window)[0].outputs[0]
        for window in (1, llm.executor.max_window)
    )
    assert drafted.token_ids == alone.token_ids
    assert drafted.finish_reason == "stop"
    assert re.fullmatch(expected, drafted.text)
    for one, other in zip(alone.logprobs or (), drafted.logprobs or (), strict=True):
        assert abs(one.logprob - other.logprob) < 1e-9


def test_drafts_stay_inside_a_form(llms: dict[str, LLM]) -> None:
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(regex="[a-f]{20}"))
    generation = llms["tiny"].generate(["Once upon a time"], params, verify_window=llms["tiny"].executor.max_window)
    assert generation.statistics.accepted_tokens > 0


def test_the_walk_leaves_the_matcher_where_it_was(llms: dict[str, LLM]) -> None:
    llm = llms["tiny"]
    form = StructuredOutputs(regex="ab*c")
    (params,) = SamplingParams(structured_outputs=form, seed=0).each()
    (mask,) = llm.new_request("a", params, where="here").edits
    tokens = [llm.tokenizer.encode(text, add_special_tokens=False)[0] for text in "abcz"]
    logits = torch.zeros(5, llm.engine.config.pretrained_config.vocab_size, dtype=torch.float64)
    first = mask.apply(logits[:1], torch.tensor([], dtype=torch.int64))
    walked = mask.apply(logits, torch.tensor(tokens))
    assert torch.equal(walked[:1], first)
    assert walked[1, tokens[1]] == 0
    assert walked[1, tokens[3]] == float("-inf")
    assert torch.equal(mask.apply(logits[:1], torch.tensor([], dtype=torch.int64)), first)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutputs(json="{"), "structured_outputs.json: is no JSON"),
        (StructuredOutputs(regex="(a"), r"structured_outputs.regex: missing \), unterminated subpattern at position 0"),
        (StructuredOutputs(grammar="root ::= root"), "structured_outputs.grammar: no text has this form"),
        (StructuredOutputs(regex="\ud800"), "structured_outputs.regex: "),
        (StructuredOutputs(grammar='root ::= "\ud800"'), "structured_outputs.grammar: "),
        (StructuredOutputs(choice=["\ud800"]), "structured_outputs.choice: "),
        (StructuredOutputs(json={"const": "\ud800"}), "structured_outputs.json: "),
        (StructuredOutputs(json={"const": {1, 2}}), "structured_outputs.json: .*not JSON serializable"),
        (StructuredOutputs(json="[1]"), "structured_outputs.json: must be a JSON schema"),
        (StructuredOutputs(json="false"), "structured_outputs.json: no value matches it"),
        (StructuredOutputs(json={"minItems": 10**9}), "structured_outputs.json.minItems: is 1000000000; more than"),
        (StructuredOutputs(json={"maxLength": 10**9}), "structured_outputs.json.maxLength: is 1000000000; more than"),
        (
            StructuredOutputs(json={"properties": {"a b": {"items": {"contains": {}}}}}),
            r"structured_outputs.json.properties\['a b'\].items.contains: is not supported",
        ),
        (StructuredOutputs(regex=r"(a)\1"), "structured_outputs.regex: a backreference is not supported"),
        (StructuredOutputs(regex="(?=a)a"), "structured_outputs.regex: a lookahead or lookbehind is not supported"),
        (StructuredOutputs(json={"const": float("nan")}), "structured_outputs.json: "),
        (
            StructuredOutputs(json='{"items":' * 65 + "{}" + "}" * 65),
            "structured_outputs.json: has 66 objects and lists",
        ),
        (StructuredOutputs(regex="a" * 200_000), "structured_outputs.regex: has 200000 characters"),
    ],
)
def test_what_is_no_form_is_refused_in_one_line(llms: dict[str, LLM], form: StructuredOutputs, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        llms["tiny"].generate(["a"], SamplingParams(structured_outputs=form))
    assert "\n" not in str(refused.value)
    assert "Check failed" not in str(refused.value)


def test_brackets_in_texts_nest_nothing(llms: dict[str, LLM]) -> None:
    llms["tiny"].require_form(StructuredOutputs(json={"enum": ["{[" * 70, '\\"[' * 70]}))


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(grammar='root ::= "abc" x\nx ::= x'),
        StructuredOutputs(grammar='root ::= "abc" x\nx ::= y "d"\ny ::= x "e"'),
    ],
    ids=["one rule", "two rules"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("window", [1, 8])
def test_a_dead_end_ends_one_request(
    llms: dict[str, LLM], form: StructuredOutputs, temperature: float, window: int
) -> None:
    llm = llms["tiny"]
    plain = SamplingParams(max_tokens=20)
    (expected,) = llm.generate(["Once upon"], plain)[0].outputs
    dead, other = (
        llm.new_request("Once upon", params.each()[0], where="here")
        for params in (SamplingParams(temperature=temperature, seed=1, structured_outputs=form), plain)
    )
    run(llm, [dead, other], min(window, llm.executor.max_window))
    assert (dead.finish_reason, dead.text) == ("error", "abc")
    assert dead.error is not None
    assert dead.error.startswith("structured_outputs: no token")
    assert other.output == expected.token_ids


def test_min_tokens_and_bias_leave_a_form_its_end(llms: dict[str, LLM]) -> None:
    form = StructuredOutputs(choice=["yes", "no"])
    bias = dict.fromkeys(range(llms["tiny"].engine.config.pretrained_config.vocab_size), -100.0)
    params = SamplingParams(max_tokens=60, min_tokens=50, structured_outputs=form, logit_bias=bias)
    (output,) = llms["tiny"].generate(["Once upon"], params)[0].outputs
    assert (output.finish_reason, output.text in ("yes", "no")) == ("stop", True)


@pytest.mark.parametrize("bias", [float("-inf"), float("inf"), float("nan")])
def test_a_bias_that_is_not_finite_is_refused(bias: float) -> None:
    with pytest.raises(UserError, match=r"logit_bias\[3\] is"):
        SamplingParams(logit_bias={3: bias})


def test_special_tokens_and_padding_are_in_no_form(llms: dict[str, LLM]) -> None:
    tokenizer = llms["tiny"].engine.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tokenizer.add_tokens(["<call>", AddedToken("<tool_call>", special=True), AddedToken("<|unnamed|>", special=True)])
    special, call, unnamed, tag = tokenizer.convert_tokens_to_ids(["<|image|>", "<call>", "<|unnamed|>", "<tool_call>"])
    assert unnamed not in tokenizer.all_special_ids or tokenizer.added_tokens_decoder[unnamed].special
    size = len(tokenizer) + 50
    (end,) = llms["tiny"].engine.config.pretrained_config.eos_token_ids
    mask = GrammarCompiler(tokenizer, size, [end]).mask(StructuredOutputs(regex=".+"))
    allowed = mask.apply(torch.zeros(1, size), torch.tensor([], dtype=torch.int64))[0].isfinite()
    assert allowed[call] and allowed[tag]
    assert not allowed[special] and not allowed[unnamed]
    assert not allowed[len(tokenizer) :].any()
    assert not allowed[end]
    mask.record(call)
    allowed = mask.apply(torch.zeros(1, size), torch.tensor([], dtype=torch.int64))[0].isfinite()
    assert allowed[end]
    assert not allowed[special]


def test_whitespace_of_json_is_bounded(llms: dict[str, LLM]) -> None:
    llm = llms["tiny"]
    (params,) = SamplingParams(structured_outputs=StructuredOutputs(json_object=True)).each()
    size = llm.engine.config.pretrained_config.vocab_size
    opening, space = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("{", "\n"))
    (mask,) = llm.new_request("a", params, where="here").edits
    guesses = torch.tensor([opening] + [space] * (MOST_WHITESPACE + 1))
    edited = mask.apply(torch.zeros(len(guesses), size), guesses[:-1])
    assert torch.equal(edited[1:, space].isfinite(), torch.arange(MOST_WHITESPACE + 1) < MOST_WHITESPACE)


def test_threads_share_one_compiler(llms: dict[str, LLM]) -> None:
    with LLM(llms["tiny"].engine.path, device="cpu") as llm, ThreadPoolExecutor(4) as pool:
        params = [
            SamplingParams(structured_outputs=StructuredOutputs(regex="a" * count + "b"), seed=0)
            for count in (1, 2, 3, 4)
        ]
        made = list(pool.map(lambda one: llm.new_request("a", one, where="here"), params))
        run(llm, made, 1)
    assert [one.text for one in made] == ["ab", "aab", "aaab", "aaaab"]


@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_float32_stays_in_a_form_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    """What is impossible stays so, and is not NaN, however far logits are stretched or pressed together."""
    with build_pair(tmp_path, TINY / "target", TINY / "drafter", dtype="float32") as llm:
        params = [
            SamplingParams(max_tokens=90, temperature=temperature, n=4, seed=seed, structured_outputs=form, **filters)
            for seed, (form, _) in enumerate(FORMS)
            for filters in ({}, {"top_p": 0.9, "min_p": 0.01}, {"top_k": 2, "logit_bias": {40: 100.0, 41: -100.0}})
        ]
        outputs = llm.generate(["Once upon a time"] * len(params), params, verify_window=llm.executor.max_window)
    for index, output in enumerate(outputs):
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            assert re.fullmatch(FORMS[index // 3][1], completion.text)


def test_forms_that_nobody_needs_are_forgotten(llms: dict[str, LLM]) -> None:
    """Clients may send a new one with every request."""
    config = llms["tiny"].engine.config.pretrained_config
    compiler = GrammarCompiler(llms["tiny"].tokenizer, config.vocab_size, config.eos_token_ids)
    for index in range(100):
        compiler.mask(StructuredOutputs(regex=f"{index}[a-z]{{1,9}}"))
    assert list(compiler._compiled) == [("regex", f"{index}[a-z]{{1,9}}") for index in range(68, 100)]


@pytest.mark.parametrize(("form", "ends"), [(r"(yes|no)", True), (r"[a-f]+", False)])
def test_a_target_without_an_end_of_sequence(
    llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch, form: str, ends: bool
) -> None:
    """An output ends where nothing else may follow its form, and goes on as long as it may where something can."""
    llm = llms["tiny"]
    config = llm.engine.config.pretrained_config
    compiler = GrammarCompiler(llm.tokenizer, config.vocab_size, [])
    monkeypatch.setattr(llm, "_compiler", compiler)
    params = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputs(regex=form))
    for window in (1, llm.executor.max_window):
        (output,) = llm.generate(["Once upon"], params, verify_window=window)[0].outputs
        assert re.fullmatch(form, output.text)
        assert output.finish_reason == ("stop" if ends else "length")


def run(llm: LLM, requests: list[Request], window: int) -> None:
    scheduler = Scheduler(llm.executor, FixedWindow(window))
    scheduler.add(requests)
    while not scheduler.idle:
        scheduler.step()
