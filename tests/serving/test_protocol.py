"""What a body may be, and what it may cost before it is refused."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from dflash_trt.serving.chat_protocol import ChatRequest, template_variables
from dflash_trt.serving.completion_protocol import CompletionRequest
from dflash_trt.serving.invalid_field import InvalidField
from dflash_trt.serving.protocol import Strict, token_biases
from dflash_trt.serving.tokenization import TokenizeRequest


def test_a_list_is_refused_at_its_first_wrong_item() -> None:
    with pytest.raises(ValidationError) as refusal:
        CompletionRequest(prompt=[True] * 10_000)  # type: ignore[list-item]
    assert refusal.value.error_count() < 10


def test_whatever_may_be_absent_may_be_null() -> None:
    """At any depth: clients send back what they got, nulls included."""
    kinds: set[type[Strict]] = set()

    def collect(kind: type[Strict]) -> None:
        kinds.add(kind)
        for each in kind.__subclasses__():
            collect(each)

    collect(Strict)
    assert {ChatRequest, CompletionRequest, TokenizeRequest} < kinds and len(kinds) > 12
    for kind in kinds:
        for name, field in kind.model_fields.items():
            takes_null = field.annotation in (Any, type(None)) or type(None) in get_args(field.annotation)
            assert field.is_required() or takes_null, (kind.__name__, name)


def test_effort_is_a_variable_of_the_template_and_the_client_s_own_variables_win() -> None:
    assert template_variables(None, None) == {}
    assert template_variables({}, "low") == {"reasoning_effort": "low", "enable_thinking": True}
    assert template_variables(None, "none") == {"reasoning_effort": "none", "enable_thinking": False}
    given = {"enable_thinking": False, "colour": "red"}
    assert template_variables(given, "high") == {"reasoning_effort": "high", **given}


def test_bad_keys_of_logit_bias_are_told_together() -> None:
    with pytest.raises(InvalidField) as refusal:
        token_biases({"1": 1.0, "hello": 1.0, "9": 1.0, "²": 1.0, "-1": 1.0}, 9)
    assert refusal.value.field == "logit_bias"
    assert "0 to 8, not 'hello', '9', '²', '-1'" in str(refusal.value)
    with pytest.raises(InvalidField, match="and 80 more"):
        token_biases({f"a{i}": 1.0 for i in range(100)}, 9)
    assert token_biases({"1": 2.0, "08": -1.0}, 9) == {1: 2.0, 8: -1.0}
