"""Lossless DFlash speculative decoding: build an engine from a target and its drafter, check it, run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_trt.runtime.llm import LLM
    from dflash_trt.runtime.sampling import SamplingParams
    from dflash_trt.runtime.structured import StructuredOutputs

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`LLM` and its parameters, imported when first asked for: the command line's help needs no torch."""
    if name == "LLM":
        from dflash_trt.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from dflash_trt.runtime.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from dflash_trt.runtime.structured import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
