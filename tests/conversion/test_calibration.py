"""The result of a calibration, and which results are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.conversion.calibration import Calibration, checked_amax
from dflash_trt.errors import UserError

amaxes = st.dictionaries(st.text(), st.floats(0, width=32, exclude_min=True, allow_infinity=False))


@given(inputs=amaxes, keys=amaxes, values=amaxes)
def test_json_loses_nothing(inputs: dict[str, float], keys: dict[str, float], values: dict[str, float]) -> None:
    calibration = Calibration(inputs, keys, values, "method")
    assert Calibration(**json.loads(json.dumps(asdict(calibration)))) == calibration


@given(amaxes)
def test_float32_values_are_kept(found: dict[str, float]) -> None:
    assert checked_amax({name: torch.tensor(value) for name, value in found.items()}, "input", Path("x")) == found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "x: no calibration token reached b; calibrate with more and longer samples"),
        (torch.tensor(0.0), "x: the largest magnitude of the input of b is 0, which"),
        (torch.tensor(float("inf")), "x: the largest magnitude of the input of b is inf, which"),
        (torch.tensor(float("nan")), "x: the largest magnitude of the input of b is nan, which"),
    ],
)
def test_refuses_by_name(value: torch.Tensor | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked_amax({"a": torch.tensor(1.0), "b": value}, "input", Path("x"))
