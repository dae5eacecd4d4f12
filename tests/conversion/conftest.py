"""Checkpoints to convert, text to calibrate with, and what ModelOpt exports of the same."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import random_drafter, random_target

PRESETS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG", "w4a16_nvfp4": "W4A16_NVFP4_CFG"}


def modelopt_export(
    source: Path,
    output: Path,
    qformat: str,
    samples: list[list[int]],
    *,
    kv_cache: bool = False,
    disabled: tuple[str, ...] = (),
) -> None:
    """Export what ModelOpt makes of a checkpoint, calibrated on `samples` one at a time."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(getattr(mtq, PRESETS[qformat]))
    if kv_cache:
        config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    config["quant_cfg"] += [{"quantizer_name": pattern, "enable": False} for pattern in disabled]

    def run(model: torch.nn.Module) -> None:
        for sample in samples:
            model(torch.tensor([sample]))

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        export_hf_checkpoint(mtq.quantize(model, config, run), export_dir=output)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], Path]:
    """Makes a directory with a random target/ of a family, in a type, as transformers saves it, and a drafter/ for it."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def make(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{dtype}")
            overrides = {"qwen3": {"tie_word_embeddings": True}, "llama": {"attention_bias": True}}[family]
            target = random_target(directory / "target", family, hidden_size=64, intermediate_size=96, **overrides)
            random_drafter(directory / "drafter", target)
            target.to(dtype).save_pretrained(directory / "target")
            made[family, dtype] = directory
        return made[family, dtype]

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three samples that the random targets' tokenizer encodes as they are."""
    path = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    rows = ["def reverse(text):", "the quick brown fox jumps over the lazy dog", "0123456789"]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path
