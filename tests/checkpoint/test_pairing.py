"""Which drafters are refused for which targets, and how the refusal names both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.pairing import check_pairing
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER


@pytest.fixture
def target(llama_config: dict[str, Any]) -> TargetConfig:
    return TargetConfig.from_dict(llama_config, Path("target/config.json"))


@pytest.fixture(params=["z-lab", "speculators"])
def drafter(
    request: pytest.FixtureRequest, z_lab_config: dict[str, Any], speculators_config: dict[str, Any]
) -> DrafterConfig:
    config = z_lab_config if request.param == "z-lab" else speculators_config
    return DrafterConfig.from_dict(config, Path("draft/config.json"))


def test_accepts_its_own(target: TargetConfig, drafter: DrafterConfig) -> None:
    check_pairing(target, Path("target"), drafter, Path("draft"))


def test_accepts_the_example(smollm2_path: Path) -> None:
    target, drafter = open_target(smollm2_path), open_drafter(DRAFTER)
    check_pairing(target.config, target.path, drafter.config, drafter.path)


@pytest.mark.parametrize(
    ("changes", "z_lab_key", "speculators_key", "values"),
    [
        ({"hidden_size": 64}, "hidden_size", "transformer_layer_config.hidden_size", (32, 64)),
        ({"vocab_size": 100}, "vocab_size", "transformer_layer_config.vocab_size", (96, 100)),
        ({"num_hidden_layers": 4}, "num_target_layers", None, (3, 4)),
    ],
)
def test_refuses_another_target(
    target: TargetConfig,
    drafter: DrafterConfig,
    changes: dict[str, Any],
    z_lab_key: str,
    speculators_key: str | None,
    values: tuple[int, int],
) -> None:
    key = z_lab_key if drafter.format == "z-lab" else speculators_key
    if key is None:
        check_pairing(replace(target, **changes), Path("target"), drafter, Path("draft"))
        return
    with pytest.raises(UserError) as refusal:
        check_pairing(replace(target, **changes), Path("target.gguf"), drafter, Path("draft"))
    (target_key,) = changes
    expected = f"draft: {key} is {values[0]}, {target_key} of target.gguf is {values[1]}: "
    assert str(refusal.value).startswith(expected)


def test_refuses_taps_beyond_the_target(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Each format's message counts as its file does."""
    small = replace(target, num_hidden_layers=2)
    anonymous = replace(drafter, num_target_layers=None)
    with pytest.raises(UserError) as refusal:
        check_pairing(small, Path("target"), anonymous, Path("draft"))
    if drafter.format == "z-lab":
        expected = "target_layer_ids is up to 2, num_hidden_layers of target is 2: the last layer to tap is 1"
    else:
        expected = "aux_hidden_state_layer_ids is up to 3, num_hidden_layers of target is 2: the last layer to tap is 2"
    assert str(refusal.value) == f"draft: {expected}"


def test_refuses_a_mask_outside_the_embedding(target: TargetConfig, drafter: DrafterConfig) -> None:
    outside = replace(drafter, mask_token_id=96)
    with pytest.raises(
        UserError, match=r"^draft: mask_token_id is 96, vocab_size of target is 96: the mask needs a row"
    ):
        check_pairing(target, Path("target"), outside, Path("draft"))


def test_names_the_config_files_of_directories(
    target: TargetConfig, drafter: DrafterConfig, tmp_path: Path, write_json: Callable[[str, Any], Path]
) -> None:
    config = write_json("config.json", {})
    with pytest.raises(UserError) as refusal:
        check_pairing(replace(target, hidden_size=64), tmp_path, drafter, tmp_path)
    assert str(refusal.value).startswith(f"{config}: ")
    assert f"hidden_size of {config} is 64" in str(refusal.value)
