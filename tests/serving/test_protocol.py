"""What a body may be, and what it may cost before it is refused."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from dflash_trt.serving.chat_protocol import ChatRequest
from dflash_trt.serving.completion_protocol import CompletionRequest
from dflash_trt.serving.protocol import Strict
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
            takes_null = field.annotation is type(None) or type(None) in get_args(field.annotation)
            assert field.is_required() or takes_null, (kind.__name__, name)
