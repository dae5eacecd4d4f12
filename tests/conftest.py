"""Engines that several tests share, built once a session."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import tensorrt_rtx
import torch
from hypothesis import settings

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig
from dflash_trt.runtime.llm import LLM
from tests.exports import Exports
from tests.tensorrt_engines import TensorRTEngines
from tests.tiny_models import random_drafter, random_target

TINY = Path(str(files("dflash_trt.examples"))) / "tiny"

QUANTIZED: dict[str, tuple[tuple[QuantAlgo, bool], tuple[QuantAlgo | None, bool]]] = {
    "FP8": (("FP8", False), ("NVFP4", True)),
    "NVFP4": (("NVFP4", False), (None, False)),
    "FP8 caches": (("W4A16_NVFP4", True), ("FP8", True)),
}
"""Of target and drafter: the format of linear layers, and whether the cache is FP8."""

# TensorRT goes on writing to the logger of the first of its objects, and crashes if that is gone before the others.
BUILDER = tensorrt_rtx.Builder(tensorrt_rtx.Logger(tensorrt_rtx.Logger.ERROR))

torch.set_num_threads(1)
settings.register_profile("untimed", deadline=None)  # other processes use the machine too
settings.load_profile("untimed")


def build_pair(directory: Path, target: Path, drafter: Path, **options: object) -> LLM:
    """Build an engine in float64 with room for eight and load it."""
    config = BuildConfig(
        **{"dtype": "float64", "max_batch_size": 8, "max_seq_len": 128, "max_num_tokens": 16, **options}  # type: ignore[arg-type]
    )
    build_engine(open_target(target), open_drafter(drafter), config, directory)
    return LLM(directory, device="cpu")


class Engines(dict[str, LLM]):
    """Loaded engines by name, each built when first asked for; in float64, but for "tiny float32" and "tiny bfloat16".

    "llama" and "qwen3" are random pairs, whose checkpoints are in `root`/NAME/target and drafter; "tiny" is the trained
    pair. Those of `QUANTIZED` are random Llama pairs, the target quantized by ModelOpt.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, name: str) -> LLM:
        directory = self.root / name
        if name.startswith("tiny"):
            dtype = name.partition(" ")[2] or "float64"
            self[name] = build_pair(
                directory / "engine", TINY / "target", TINY / "drafter", dtype=dtype, max_seq_len=512, max_num_tokens=64
            )
        elif name in QUANTIZED:
            # Which imports ModelOpt, and that takes seconds.
            from tests.quantized_models import quantized_drafter, quantized_target

            (algo, fp8_cache), (drafter_algo, drafter_fp8_cache) = QUANTIZED[name]
            target = quantized_target(directory / "target", algo, fp8_cache=fp8_cache, num_hidden_layers=2)
            quantized_drafter(
                directory / "drafter",
                target,
                drafter_algo,
                fp8_cache=drafter_fp8_cache,
                num_hidden_layers=1,
                target_layer_ids=(0, 1),
            )
            self[name] = build_pair(directory / "engine", directory / "target", directory / "drafter")
        else:
            overrides = {"llama": {"attention_bias": True}, "qwen3": {"tie_word_embeddings": True}}[name]
            target = random_target(directory / "target", name, **overrides)
            random_drafter(directory / "drafter", target)
            self[name] = build_pair(directory / "engine", directory / "target", directory / "drafter")
        return self[name]


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is written to, or read from, the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that name no seed draw the same in every run of a test."""
    monkeypatch.setattr("dflash_trt.runtime.sampling_params.randbelow", random.Random(0).randrange)


@pytest.fixture(scope="session")
def llms(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Engines that tests share."""
    return Engines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def tensorrt_engines(tmp_path_factory: pytest.TempPathFactory) -> TensorRTEngines:
    """TensorRT engines that tests share; they copy what they change."""
    return TensorRTEngines(tmp_path_factory.mktemp("tensorrt"), TINY)


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """Checkpoints by ModelOpt that tests share; they copy what they change."""
    return Exports(tmp_path_factory.mktemp("exports"))
