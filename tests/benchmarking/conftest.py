"""The trained tiny pair in BF16, and what it is converted to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.benchmarking.quality import HeldOutText, Models, read_held_out_text
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats, QFormat
from tests.conftest import TINY

PROMPTS = (TINY / "prompts.txt").read_text().splitlines()


def models(directory: Path) -> Models:
    """The target/ and drafter/ of a directory."""
    return Models(open_target(directory / "target"), open_drafter(directory / "drafter"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny pair, whose published weights are FP16, rounded to BF16."""
    directory = tmp_path_factory.mktemp("trained")
    for name in ("target", "drafter"):
        shutil.copytree(TINY / name, directory / name)
        weights = directory / name / "model.safetensors"
        tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(weights).items()}
        save_file(tensors, weights, {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of the tiny pair's kind, as JSONL."""
    path = tmp_path_factory.mktemp("text") / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "response": "It was cold."}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture(scope="session")
def text(trained: Path, chats: Path) -> HeldOutText:
    """Four of them, encoded, in float32."""
    return read_held_out_text(chats, open_target(trained / "target"), size=4, max_length=64, dtype=torch.float32)


@pytest.fixture(scope="session")
def converted(trained: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[QFormat], Path]:
    """Converts both models of the trained pair to a format, with FP8 caches where it is FP8."""
    made: dict[QFormat, Path] = {}

    def convert(qformat: QFormat) -> Path:
        if qformat not in made:
            made[qformat] = tmp_path_factory.mktemp("converted") / qformat
            formats = Formats(qformat, "fp8" if qformat == "fp8" else "none")
            data = CalibrationData(chats, size=8, max_length=64) if qformat in ("fp8", "nvfp4") else None
            pair = models(trained)
            plan_conversion(pair.target, formats, pair.drafter, formats, data, made[qformat]).run()
        return made[qformat]

    return convert
