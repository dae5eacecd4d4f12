"""TensorRT engines on the GPU that they were built for, against the torch executor on the same weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import build_engine, plan_build
from dflash_trt.engine.compatibility import gpu_here, installed_version
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.support import COMPUTE_CAPABILITIES, is_supported
from dflash_trt.engine.tensorrt_api import TensorRTName
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.tensorrt_executor import TensorRTVerifier
from tests.conftest import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
PROMPTS = [[5, 6, 7], list(range(3, 90)), [40, 41], [100] * 20, [7]]

BATCHES = PROMPTS[:1], PROMPTS[:3], PROMPTS[:1]


def built(backend: TensorRTName, tmp_path: Path) -> tuple[LLM, LLM]:
    """One pair by torch and by TensorRT, in float32, where near ties are rare.

    The test is skipped where the library, or a GPU that it runs on, is missing; a refusal to build for one fails it.
    """
    if installed_version(backend) is None:
        pytest.skip(f"{backend} is not installed")
    gpu = gpu_here()
    assert gpu is not None
    if gpu not in COMPUTE_CAPABILITIES[backend] or not is_supported("float32", backend, gpu):
        pytest.skip(f"{backend} has no float32 for {gpu}")
    if backend == "tensorrt" and find_spec("triton") is None:
        pytest.skip("Triton, which the plugin needs, is not installed")
    target, drafter = open_target(TINY / "target"), open_drafter(TINY / "drafter")
    config = BuildConfig(dtype="float32", max_batch_size=3, max_seq_len=256, max_num_tokens=32)
    plan_build(target, drafter, config, tmp_path / "tensorrt", backend, gpu).write()
    build_engine(target, drafter, config, tmp_path / "torch")
    expected, actual = (LLM(tmp_path / name, device="cuda") for name in ("torch", "tensorrt"))
    return expected, actual


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_equal_those_of_torch(backend: TensorRTName, temperature: float, tmp_path: Path) -> None:
    """With and without speculation, in fewer slots than prompts."""
    expected, actual = built(backend, tmp_path)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
    for window in (1, 4, 8):
        tokens = [
            [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, verify_window=window)]
            for llm in (expected, actual)
        ]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_what_a_pass_does_not_write_stays(backend: TensorRTName, tmp_path: Path) -> None:
    """Caches are written at the addresses that are bound, not written elsewhere and copied there whole."""
    _, llm = built(backend, tmp_path)
    verifier = llm.executor.verifier
    assert isinstance(verifier, TensorRTVerifier)
    caches = [cache for model in verifier.caches.values() for cache in (model.keys, model.values)]
    for cache in caches:
        cache[:, -1] = 3.0
        cache[:, 0, :, 200] = 3.0
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=40, ignore_eos=True))
    for cache in caches:
        assert (cache[:, -1] == 3.0).all() and (cache[:, 0, :, 200] == 3.0).all()
        assert not (cache[:, 0, :, :20] == 3.0).all()


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_a_batch_between_changes_nothing(backend: TensorRTName, tmp_path: Path) -> None:
    """Memory between kernels is reserved once, for whatever batch comes."""
    _, llm = built(backend, tmp_path)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, _, again = ([each.outputs[0].token_ids for each in llm.generate(batch, params)] for batch in BATCHES)
    assert first == again
