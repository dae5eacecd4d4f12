"""What is held when a pair is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.models.pair import load_pair
from dflash_trt.quantization.fp8 import FP8Tensor
from dflash_trt.quantization.nvfp4 import NVFP4Tensor
from tests.conftest import QUANTIZED, Engines


def tensors_of(held: Any) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, tuple):
        for item in held:
            yield from tensors_of(item)
    elif is_dataclass(held):
        for field in fields(held):
            yield from tensors_of(getattr(held, field.name))


@pytest.mark.parametrize("name", ["tiny", *QUANTIZED])
def test_weights_are_held_once_and_mapped(llms: Engines, name: str) -> None:
    """Every tensor lies in the file, quantized ones in the types that they have there, and there is no other."""
    engine, pair = llms[name].engine, llms[name].executor.verifier.model.pair
    maps = psutil.Process().memory_maps(grouped=False)
    for weights, file in (
        (pair.target_weights, engine.target_weights),
        (pair.drafter_weights, engine.drafter_weights),
    ):
        held = {tensor.data_ptr(): tensor for tensor in tensors_of(weights)}
        regions = [[int(bound, 16) for bound in part.addr.split("-")] for part in maps if part.path == str(file)]
        assert all(any(low <= address < high for low, high in regions) for address in held)
        stored = load_file(file).values()
        assert sorted((str(t.dtype), t.nbytes) for t in held.values()) == sorted(
            (str(t.dtype), t.nbytes) for t in stored
        )


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_model_has_its_own_formats(llms: Engines, name: str) -> None:
    verifier = llms[name].executor.verifier
    kinds = {"FP8": FP8Tensor, "NVFP4": NVFP4Tensor, "W4A16_NVFP4": NVFP4Tensor, None: Tensor}
    models = (verifier.model.pair.target_weights, verifier.model.pair.drafter_weights)
    caches = (verifier.caches.target, verifier.caches.drafter)
    for (algo, fp8_cache), weights, cache in zip(QUANTIZED[name], models, caches, strict=True):
        for layer in weights.layers:
            for linear in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
                assert isinstance(linear.weight, kinds[algo])
                assert (linear.input_scale is not None) is (algo in ("FP8", "NVFP4"))
        dtype = torch.float8_e4m3fn if fp8_cache else torch.float64
        assert {part.dtype for layer in cache for part in (layer.keys, layer.values)} == {dtype}


@pytest.mark.parametrize("name", ["llama", *QUANTIZED])
def test_a_pair_of_checkpoints_is_that_of_an_engine(llms: Engines, name: str) -> None:
    """The checkpoints are in float32, the engine in float64."""
    root, built = llms.root / name, llms[name].executor.verifier.model.pair
    target, drafter = open_target(root / "target"), open_drafter(root / "drafter")
    pair = load_pair(target, drafter, positions=40, dtype=torch.float64, device=torch.device("cpu"))
    assert (pair.target, pair.drafter) == (built.target, built.drafter)
    for ours, theirs in ((pair.target_weights, built.target_weights), (pair.drafter_weights, built.drafter_weights)):
        for tensor, expected in zip(tensors_of(ours), tensors_of(theirs), strict=True):
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    assert torch.equal(pair.target_rotary.cos, built.target_rotary.cos[:40])
