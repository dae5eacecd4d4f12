"""What the benchmarks compare with: the same checkpoints in transformers and in the authors' dflash package."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from dflash_trt.checkpoint.open_checkpoint import open_target

EXAMPLES = Path(str(files("dflash_trt.examples")))
TINY = EXAMPLES / "tiny"
HELD_OUT = Path(__file__).parent / "data" / "smollm2-greedy-heldout.jsonl.gz"


def held_out() -> list[tuple[list[int], list[int]]]:
    """Prompts and SmolLM2's greedy answers as transformers gave them in float32, none of them trained on."""
    with gzip.open(HELD_OUT, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["prompt_ids"], row["output_ids"]) for row in rows]


def transformers_target(path: Path) -> Any:
    """A target in float32 as transformers runs it, from the tensors that we read."""
    checkpoint = open_target(path)
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config.to_dict())).eval().float()
    state = {name: checkpoint.weights.read(name).float() for name in checkpoint.weights.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{path}: transformers misses {missing}, does not expect {unexpected}")
    model.tie_weights()
    return model


def authors_drafter(directory: Path) -> DFlashDraftModel:
    """A z-lab drafter in float32 as its authors' package runs it."""
    config = Qwen3Config(**json.loads((directory / "config.json").read_text()))
    model = DFlashDraftModel(config).eval().float()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()})
    return model


def set_threads(threads: int) -> None:
    """One setting for all parties."""
    torch.set_num_threads(threads)
