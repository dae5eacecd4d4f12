"""What an engine directory holds: weights of the torch backend, or TensorRT's engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.engine.bindings import Binding, Bindings, engine_bindings
from dflash_trt.engine.compatibility import requirements
from dflash_trt.engine.directory import Engine, open_engine
from dflash_trt.engine.plans import open_plans
from dflash_trt.engine.weights import open_weights
from dflash_trt.errors import UserError
from dflash_trt.inspection.layers import read_layers
from dflash_trt.inspection.survey import count_formats, counted, merged


def describe_engine(path: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Configuration, what it needs to run and what is in it; ranks of the torch backend are counted together.

    Of TensorRT's engines: each rank's sizes, and what goes in and out. They are read, to see that they are not damaged.

    Args:
        progress: told how many of how many engines have been read.

    Raises:
        UserError: it is no engine of this version, or a weight file is damaged.
    """
    engine = open_engine(path)
    config = engine.config
    target, drafter = config.pretrained_config, config.speculative_config
    told = {
        "kind": "engine directory",
        "version": config.version,
        "builder": asdict(config.builder),
        "needs": requirements(config.builder),
        "build_config": asdict(config.build_config),
        "target": f"{target.architecture}, {target.num_hidden_layers} layers, hidden {target.hidden_size}",
        "drafter": f"{drafter.num_hidden_layers} layers, block {drafter.block_size}, "
        f"taps {list(drafter.target_layer_ids)}",
        "cache_bytes": config.cache_bytes,
    }
    if config.builder.tensorrt is None:
        ranks = range(config.build_config.tp_size)
        layers = [(weights, read_layers(weights)) for rank in ranks for weights in open_weights(engine, rank)]
        return {**told, **counted(merged(count_formats(weights, held) for weights, held in layers)), "problems": []}
    formats = {"target": _format(target.quantization), "drafter": _format(drafter.quantization)}
    engines = {name: told_bindings(bindings) for name, bindings in engine_bindings(config).items()}
    ranks_told, problems = _ranks(engine, progress)
    return {**told, "quantization": formats, "ranks": ranks_told, "engines": engines, "problems": problems}


def told_bindings(bindings: Bindings) -> dict[str, Any]:
    """The table of an engine as JSON has it; a profile is the least, the usual and the greatest of each size."""

    def told(binding: Binding) -> dict[str, Any]:
        dtype = str(binding.dtype).removeprefix("torch.")
        return {"name": binding.name, "dtype": dtype, "shape": list(binding.shape), "meaning": binding.meaning}

    return {
        "inputs": [told(binding) for binding in bindings.inputs],
        "outputs": [told(binding) for binding in bindings.outputs],
        "profiles": {
            name: {size: [span.least, span.usual, span.most] for size, span in profile.items()}
            for name, profile in bindings.profiles.items()
        },
    }


def _ranks(engine: Engine, progress: Callable[[int, int], None]) -> tuple[list[dict[str, int]], list[str]]:
    """Sizes of every rank's files, and what is wrong with them."""
    told, problems = [], []
    count = engine.config.build_config.tp_size
    for rank in range(count):
        try:
            plans = open_plans(engine, rank)
            sizes = {f"{which}_bytes": record.size for which, record in plans.records.items()}
            told.append({"rank": rank, **sizes, "shared_bytes": plans.shared.path.stat().st_size})
            for number, which in enumerate(plans.files, start=1):
                plans.read(which).close()
                progress(2 * rank + number, 2 * count)
        except UserError as problem:
            problems.append(str(problem))
    return told, problems


def _format(quantization: QuantizationConfig | None) -> str:
    if quantization is None:
        return "none"
    caches = "FP8 caches" if quantization.kv_cache_quant_algo == "FP8" else None
    return ", ".join(filter(None, (quantization.quant_algo, caches))) or "none"
