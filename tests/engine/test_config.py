"""What an engine's config says of memory."""

from __future__ import annotations

import pytest

from dflash_trt.engine.config import Builder, capability_number
from dflash_trt.errors import UserError
from dflash_trt.runtime.torch_executor import TorchVerifier
from tests.conftest import Engines


@pytest.mark.parametrize("name", ["llama", "tiny", "FP8", "FP8 caches"])
def test_cache_bytes_are_what_the_executor_allocates(llms: Engines, name: str) -> None:
    verifier = llms[name].executor.verifier
    assert isinstance(verifier, TorchVerifier)
    layers = (*verifier.caches.target, *verifier.caches.drafter)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert llms[name].engine.config.cache_bytes == allocated


def test_compute_capabilities_as_numbers() -> None:
    assert capability_number("sm75") == 75 and Builder("tensorrt", "11.0.0", "sm103").gpu == 103
    for wrong in ("12.0", "sm", "sm12a", "SM120"):
        with pytest.raises(UserError, match=f"^compute_capability is {wrong}, it must be sm and a number"):
            capability_number(wrong)
