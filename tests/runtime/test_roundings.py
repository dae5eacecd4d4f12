"""Where activations or caches are quantized, how many rows a pass has decides no rounding, and so no token.

A float is rounded to four or eight bits on the way: scales are made so that attention over equal values gives what lies
halfway between two of these, where the last bit of a sum would decide.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.quantization_config import QuantAlgo
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.window import FixedWindow
from tests.conftest import build_pair

FORMATS: tuple[QuantAlgo, ...] = ("NVFP4", "FP8", "W4A16_NVFP4")
DTYPES = {"NVFP4": ("float64", "float32"), "FP8": ("float64",), "W4A16_NVFP4": ("float64",)}
"""In which the promise holds: with unquantized activations, sums of float32 are taken in float32."""
CASES = [(algo, dtype) for algo in FORMATS for dtype in DTYPES[algo]]
PASSES = ((1, 1, False), (3, 3, True), (64, 4, True))
"""Tokens of a chunk, tokens that a pass verifies, and whether prefixes are reused."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target in each format over FP8 caches, its scales commensurate, and a drafter."""
    from tests.quantized_models import quantized_drafter, quantized_target

    made = {}
    for algo in FORMATS:
        made[algo] = tmp_path_factory.mktemp(algo)
        target = quantized_target(made[algo] / "target", algo, fp8_cache=True, num_hidden_layers=2)
        quantized_drafter(made[algo] / "drafter", target, None, num_hidden_layers=1, target_layer_ids=(0, 1))
        _make_commensurate(made[algo] / "target/model.safetensors")
    return made


def _make_commensurate(file: Path) -> None:
    """Scales of cached values become 6 times a power of two, and those of what `o_proj` is given that power.

    So values over their scale are codes, and of a block whose largest one is a code, 6 times their ratio to it.
    """
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("v_scale"):
            power = (tensors[name] / 6).log2().ceil().exp2()
            tensors[name] = 6 * power
            inputs = name.replace("v_proj.v_scale", "o_proj.input_scale")
            if inputs in tensors:
                tensors[inputs] = power
    save_file(tensors, file)


@pytest.mark.parametrize(("algo", "dtype"), CASES)
def test_chunks_batches_prefixes_and_drafts_change_no_token(
    checkpoints: dict[str, Path], algo: QuantAlgo, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoints[algo]
    llm = build_pair(tmp_path / "engine", made / "target", made / "drafter", dtype=dtype, max_num_tokens=64)
    rng = random.Random(f"{algo} {dtype}")
    cases = [_case(rng, llm.engine.config.pretrained_config.vocab_size) for _ in range(10)]
    expected = [_outputs(llm, [case], window=1, reuse_prefixes=False)[0] for case in cases]
    for chunk, window, reuse_prefixes in PASSES:
        monkeypatch.setattr(llm.executor, "max_num_tokens", chunk)
        assert _outputs(llm, cases, window=window, reuse_prefixes=reuse_prefixes) == expected


def _case(rng: random.Random, vocab_size: int) -> tuple[list[int], SamplingParams]:
    """Runs of one token, whose values are alike in the first layer, often after what others begin with too."""
    prompt = [7] * rng.choice([0, 0, 5, 11])
    for _ in range(rng.randint(1, 4)):
        prompt += [rng.randrange(3, vocab_size)] * rng.randint(1, 9)
    temperature = rng.choice([0.0, 1.0])
    return prompt, SamplingParams(max_tokens=rng.randint(4, 10), temperature=temperature, seed=rng.randrange(2**32))


def _outputs(
    llm: LLM, cases: list[tuple[list[int], SamplingParams]], *, window: int, reuse_prefixes: bool
) -> list[list[int]]:
    scheduler = Scheduler(llm.executor, FixedWindow(window), max_batch_size=5, reuse_prefixes=reuse_prefixes)
    requests: list[Request] = [llm.new_request(prompt, params.each()[0], where="here") for prompt, params in cases]
    scheduler.add(requests)
    while not scheduler.idle:
        scheduler.step()
    return [request.output for request in requests]
