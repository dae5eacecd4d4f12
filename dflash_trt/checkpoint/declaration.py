"""What a checkpoint declares of its quantization, also where that is not supported or contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.quantization_config import (
    QUANT_CONFIG_FILE,
    QUANTIZATION_KEY,
    QuantizationConfig,
    read_hf_quant_config,
    read_quantization,
)
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.errors import UserError

_NAMES = ("quant_method", "quant_algo", "fmt", "format", "bits", "kv_cache_scheme", "kv_cache_quant_algo")
"""What tells one quantization from another, in the configs of those who quantize."""


@dataclass(frozen=True)
class Declaration:
    """What the files of a checkpoint say of its quantization.

    Attributes:
        source: the file that says it; `config.json` where none does.
        quantization: what it says; None where it says nothing, or what is not supported.
        stated: of what is not supported, the values that tell which it is.
        unsupported: why it cannot be checked against the weights; None where it can.
        contradictions: one line for each thing that the two files say differently.
    """

    source: Path
    quantization: QuantizationConfig | None = None
    stated: Mapping[str, object] = field(default_factory=dict)
    unsupported: str | None = None
    contradictions: tuple[str, ...] = ()


def read_declaration(directory: Path) -> Declaration:
    """Read `config.json` and, where there is one, `hf_quant_config.json` beside it.

    Raises:
        UserError: a file is damaged. A method or a format that is not supported raises nothing.
    """
    config = JsonObject.from_file(directory / CONFIG_FILE)
    places: list[tuple[JsonObject, QuantizationConfig | UserError | None]] = []
    if QUANTIZATION_KEY in config:
        places.append((config.object(QUANTIZATION_KEY), _supported(lambda: read_quantization(config))))
    beside = directory / QUANT_CONFIG_FILE
    if is_file(beside):
        place = JsonObject.from_file(beside).object("quantization")
        places.append((place, _supported(lambda: read_hf_quant_config(beside))))
    if not places:
        return Declaration(config.path)
    contradictions = tuple(_contradictions(*places)) if len(places) == 2 else ()
    refusals = [read for _, read in places if isinstance(read, UserError)]
    first, read = places[0]
    if not refusals and isinstance(read, QuantizationConfig):
        return Declaration(first.path, read, contradictions=contradictions)
    stated = {name: first.values[name] for name in _NAMES if name in first}
    return Declaration(first.path, None, stated, str(refusals[0]), contradictions)


def _supported(read: Callable[[], QuantizationConfig | None]) -> QuantizationConfig | UserError | None:
    try:
        return read()
    except UserError as refusal:
        return refusal


def _contradictions(
    inside: tuple[JsonObject, QuantizationConfig | UserError | None],
    beside: tuple[JsonObject, QuantizationConfig | UserError | None],
) -> Iterator[str]:
    (config, first), (file, second) = inside, beside
    if not isinstance(first, QuantizationConfig) or not isinstance(second, QuantizationConfig):
        if "quant_algo" in config and "quant_algo" in file:
            yield from _difference(config, file, "quant_algo", config.values["quant_algo"], file.values["quant_algo"])
        return
    yield from _difference(config, file, "quant_algo", first.quant_algo, second.quant_algo)
    caches = first.kv_cache_quant_algo, second.kv_cache_quant_algo
    yield from _difference(config, file, "kv_cache_quant_algo", *caches)
    for place, names, other, others in (
        (config.key("ignore"), first.exclude_modules, file.path, second.exclude_modules),
        (file.key("exclude_modules"), second.exclude_modules, config.path, first.exclude_modules),
    ):
        missing = [name for name in names if name not in others]
        if missing:
            path = config.path if other is file.path else file.path
            yield f"{path}: {place} names {missing[0]}, {other.name} beside it does not{_first_of(missing)}"


def _difference(config: JsonObject, file: JsonObject, key: str, first: object, second: object) -> Iterator[str]:
    if first != second:
        yield (
            f"{config.path}: {config.name} says that {key} is {json.dumps(first)}, "
            f"{file.path.name} beside it {json.dumps(second)}"
        )


def _first_of(names: list[str]) -> str:
    return f"; the first of {len(names)} such" if len(names) > 1 else ""
