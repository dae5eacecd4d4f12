"""Outputs held to a form, the same with and without speculation."""

from __future__ import annotations

import re

import pytest
import torch

from dflash_trt.errors import UserError
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.structured import StructuredOutputs

FORMS = [
    (StructuredOutputs(regex="[a-f]{3,5}"), "[a-f]{3,5}"),
    (StructuredOutputs(choice=["yes", 'no\n"\\é']), 'yes|no\n"\\\\é'),
    (StructuredOutputs(grammar='root ::= "x" | "(" root ")"'), r"\(*x\)*"),
    (StructuredOutputs(json={"type": "boolean"}), "true|false"),
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
        for window in (1, llm.executor.block_size)
    )
    assert drafted.token_ids == alone.token_ids
    assert drafted.finish_reason == "stop"
    assert re.fullmatch(expected, drafted.text)
    for one, other in zip(alone.logprobs or (), drafted.logprobs or (), strict=True):
        assert abs(one.logprob - other.logprob) < 1e-9


def test_drafts_stay_inside_a_form(llms: dict[str, LLM]) -> None:
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(regex="[a-f]{20}"))
    generation = llms["tiny"].generate(["Once upon a time"], params, verify_window=llms["tiny"].executor.block_size)
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
        (StructuredOutputs(json="{"), "structured_outputs.json: Failed to parse JSON"),
        (StructuredOutputs(regex="(a"), "structured_outputs.regex: .*parenthesis is not closed"),
        (StructuredOutputs(grammar="root ::= root"), "structured_outputs.grammar: no text has this form"),
    ],
)
def test_what_is_no_form_is_refused_in_one_line(llms: dict[str, LLM], form: StructuredOutputs, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        llms["tiny"].generate(["a"], SamplingParams(structured_outputs=form))
    assert "\n" not in str(refused.value)
