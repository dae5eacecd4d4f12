"""Sampling parameters where a client gives none: those that the model's makers recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.target import GENERATION_CONFIG_FILE
from dflash_trt.runtime.sampling import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json, and what parameters they are here."""


def sampling_defaults(engine_dir: Path) -> dict[str, Any]:
    """What an engine's generation_config.json says, temperature 1 where it says none.

    Raises:
        UserError: a value in it cannot be.
    """
    path = engine_dir / GENERATION_CONFIG_FILE
    given = JsonObject.from_file(path).values if is_file(path) else {}
    defaults: dict[str, Any] = {"temperature": 1.0}
    defaults |= {name: given[key] for key, name in _NAMES.items() if given.get(key) is not None}
    SamplingParams(**defaults)
    return defaults
