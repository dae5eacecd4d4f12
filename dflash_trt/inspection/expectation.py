"""What a declaration makes of every module of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

from dflash_trt.checkpoint.declaration import Declaration
from dflash_trt.checkpoint.quantization_config import QuantAlgo

_FORMAT_OF: dict[QuantAlgo, str] = {"FP8": "FP8", "NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4"}
_WILDCARDS = re.compile(r"[*?\[]")


class Expectation:
    """The format that each linear layer must have.

    As `QuantizationConfig.algo_of`, which matches every pattern for every module: with the experts and the routers of a
    large model, millions of times. Here a pattern is looked for once.

    Args:
        declaration: what the checkpoint declares, supported or nothing.
        modules: those of the checkpoint.

    Attributes:
        source: the file that declares it.
        algo: for the weights of linear layers; None for unquantized.
        cache_algo: for keys and values.
        needs_input_scales: activations are quantized too.
        excluded: the modules that each pattern of `exclude_modules` names.
    """

    def __init__(self, declaration: Declaration, modules: Iterable[str]) -> None:
        quantization = declaration.quantization
        self.source = declaration.source
        self.algo = quantization.quant_algo if quantization else None
        self.cache_algo = quantization.kv_cache_quant_algo if quantization else None
        self.needs_input_scales = quantization is not None and quantization.quantizes_activations
        patterns = quantization.exclude_modules if quantization else ()
        known = dict.fromkeys(modules)
        self.excluded = {pattern: _named_by(pattern, known) for pattern in patterns}
        self._pattern_of = {module: pattern for pattern in reversed(self.excluded) for module in self.excluded[pattern]}

    def pattern_of(self, module: str) -> str | None:
        """The first pattern of `exclude_modules` that names the module; None where none does."""
        return self._pattern_of.get(module)

    def format_of(self, module: str) -> str | None:
        """NVFP4 or FP8; None for unquantized."""
        return None if self.algo is None or module in self._pattern_of else _FORMAT_OF[self.algo]


def _named_by(pattern: str, modules: dict[str, None]) -> tuple[str, ...]:
    if not _WILDCARDS.search(pattern):
        return (pattern,) if pattern in modules else ()
    matches = re.compile(translate(pattern)).match
    return tuple(module for module in modules if matches(module))
