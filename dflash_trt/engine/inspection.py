"""What a directory holds, told from configs and headers without reading a weight."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.target import CONFIG_FILE
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.engine.directory import is_engine_config, open_engine
from dflash_trt.engine.weights import open_weights
from dflash_trt.errors import UserError, access
from dflash_trt.models.pair import drafter_manifest, target_manifest


def describe(path: Path) -> dict[str, Any]:
    """Kind, configuration, parameters by type, and bytes of a target, a drafter or an engine directory.

    Of an engine also `cache_bytes`, what it takes beside its weights when it is loaded.

    Raises:
        UserError: it is none of them, or is damaged.
    """
    with access(path, "read"):
        if not path.exists():
            raise UserError(f"{path}: no such file or directory")
    config = _config(path)
    if is_engine_config(config):
        return _describe_engine(path)
    if "dflash_config" in config or "speculators_model_type" in config:
        drafter = open_drafter(path)
        drafter_manifest(drafter)
        return {"kind": "DFlash drafter", **_plain(drafter.config), **_contents([drafter.weights])}
    target = open_target(path)
    target_manifest(target)
    return {"kind": "target", **_plain(target.config), **_contents([target.weights])}


def _describe_engine(path: Path) -> dict[str, Any]:
    engine = open_engine(path)
    config = engine.config
    target, drafter = config.pretrained_config, config.speculative_config
    parts = open_weights(engine)
    return {
        "kind": "engine directory",
        "version": config.version,
        "builder": asdict(config.builder),
        "build_config": asdict(config.build_config),
        "target": f"{target.architecture}, {target.num_hidden_layers} layers, hidden {target.hidden_size}",
        "drafter": f"{drafter.num_hidden_layers} layers, block {drafter.block_size}, "
        f"taps {list(drafter.target_layer_ids)}",
        **_contents(parts),
        "cache_bytes": config.cache_bytes,
    }


def _contents(parts: Iterable[Weights]) -> dict[str, Any]:
    parameters: Counter[str] = Counter()
    size = 0
    for weights in parts:
        for name in weights.names():
            count = math.prod(weights.shape(name))
            parameters[str(weights.dtype(name)).removeprefix("torch.")] += count
            size += count * weights.dtype(name).itemsize
    return {"parameters": dict(parameters), "bytes": size}


def _plain(config: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if value is not None}


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
