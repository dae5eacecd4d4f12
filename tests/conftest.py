"""Engines that several tests share, built once a session."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.runtime.llm import LLM
from tests.exports import Exports
from tests.tiny_models import random_drafter, random_target

TINY = Path(str(files("dflash_trt.examples"))) / "tiny"

torch.set_num_threads(1)


def build_pair(directory: Path, target: Path, drafter: Path, **options: object) -> LLM:
    """Build an engine in float64 with room for eight and load it."""
    config = BuildConfig(
        **{"dtype": "float64", "max_batch_size": 8, "max_seq_len": 128, "max_num_tokens": 16, **options}  # type: ignore[arg-type]
    )
    build_engine(open_target(target), open_drafter(drafter), config, directory)
    return LLM(directory, device="cpu")


class Engines(dict[str, LLM]):
    """Loaded float64 engines by name, each built when first asked for.

    "llama" and "qwen3" are random pairs, whose checkpoints are in `root`/NAME/target and drafter; "tiny" is the trained
    pair.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> LLM:
        directory = self.root / name
        if name == "tiny":
            self[name] = build_pair(
                directory / "engine", TINY / "target", TINY / "drafter", max_seq_len=512, max_num_tokens=64
            )
        else:
            overrides = {"llama": {"attention_bias": True}, "qwen3": {"tie_word_embeddings": True}}[name]
            target = random_target(directory / "target", name, **overrides)
            random_drafter(directory / "drafter", target)
            self[name] = build_pair(directory / "engine", directory / "target", directory / "drafter")
        return self[name]


@pytest.fixture(scope="session")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines that tests share."""
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Checkpoints by ModelOpt that tests share; they copy what they change."""
    return Exports(tmp_path_factory.mktemp("exports"))
