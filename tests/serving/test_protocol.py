"""What a body may cost before it is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dflash_trt.serving.completion_protocol import CompletionRequest


def test_a_list_is_refused_at_its_first_wrong_item() -> None:
    with pytest.raises(ValidationError) as refusal:
        CompletionRequest(prompt=[True] * 10_000)  # type: ignore[list-item]
    assert refusal.value.error_count() < 10
