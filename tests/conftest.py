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


@pytest.fixture(scope="session")
def random_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a directory with target/, a random drafter/, and engine/ in float64."""
    pairs = {}
    for family, overrides in {"llama": {"attention_bias": True}, "qwen3": {"tie_word_embeddings": True}}.items():
        root = tmp_path_factory.mktemp(family)
        target = random_target(root / "target", family, **overrides)
        random_drafter(root / "drafter", target)
        build_pair(root / "engine", root / "target", root / "drafter")
        pairs[family] = root
    return pairs


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained tiny pair in float64, 512 positions."""
    directory = tmp_path_factory.mktemp("tiny") / "engine"
    build_pair(directory, TINY / "target", TINY / "drafter", max_seq_len=512, max_num_tokens=64)
    return directory


@pytest.fixture(scope="session")
def llms(random_pairs: dict[str, Path], tiny_engine: Path) -> dict[str, LLM]:
    """A loaded engine each of random Llama, random Qwen3 and the trained pair, in float64."""
    engines = {family: root / "engine" for family, root in random_pairs.items()}
    return {name: LLM(path, device="cpu") for name, path in {**engines, "tiny": tiny_engine}.items()}
