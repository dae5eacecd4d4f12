"""What a checkpoint says of its own quantization, in the two places where ModelOpt's unified checkpoints say it.

`hf_quant_config.json` is ModelOpt's own file; `quantization_config` in `config.json` says the same in the words of
compressed-tensors. TensorRT-LLM, vLLM and SGLang each read one of the two, so both are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.regular_file import is_file

QUANT_CONFIG_FILE = "hf_quant_config.json"
QUANTIZATION_KEY = "quantization_config"

QuantAlgo = Literal["FP8", "NVFP4", "W4A16_NVFP4"]
"""FP8 and NVFP4 quantize weights and activations, W4A16_NVFP4 weights only."""
KVCacheQuantAlgo = Literal["FP8"]

NVFP4_GROUP_SIZE = 16
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Whose layout it is: loaders ask for that name, and tell older layouts by the version."""


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint's linear layers and caches are quantized.

    Attributes:
        quant_algo: format of every linear layer that `exclude_modules` does not name; None where all are unquantized.
        kv_cache_quant_algo: format that keys and values are cached in; None for the model's own.
        exclude_modules: modules left as they were; `*` at an end stands for any rest.
    """

    quant_algo: QuantAlgo | None
    kv_cache_quant_algo: KVCacheQuantAlgo | None
    exclude_modules: tuple[str, ...]

    @property
    def quantizes_activations(self) -> bool:
        """Every quantized layer has an `input_scale`."""
        return self.quant_algo in ("FP8", "NVFP4")

    def algo_of(self, module: str) -> QuantAlgo | None:
        """The format of one linear layer, `model.layers.0.mlp.up_proj` for one; None where it is unquantized."""
        excluded = any(fnmatchcase(module, pattern) for pattern in self.exclude_modules)
        return None if excluded else self.quant_algo

    def to_hf_quant_config(self) -> dict[str, Any]:
        """The content of `hf_quant_config.json`, its keys in ModelOpt 0.47's order."""
        quantization: dict[str, Any] = {
            "quant_algo": self.quant_algo,
            "kv_cache_quant_algo": self.kv_cache_quant_algo,
        }
        if self.quant_algo in ("NVFP4", "W4A16_NVFP4"):
            quantization["group_size"] = NVFP4_GROUP_SIZE
        if self.quant_algo is not None:
            quantization["exclude_modules"] = list(self.exclude_modules)
        return {"producer": _PRODUCER, "quantization": quantization}

    def to_quantization_config(self) -> dict[str, Any]:
        """The value of `quantization_config` in `config.json`, its keys in ModelOpt 0.47's order."""
        config: dict[str, Any] = {}
        if self.quant_algo is not None:
            number: dict[str, Any] = {
                "dynamic": False,
                "num_bits": 8 if self.quant_algo == "FP8" else 4,
                "type": "float",
            }
            if self.quant_algo != "FP8":
                number["group_size"] = NVFP4_GROUP_SIZE
            activations = {"input_activations": dict(number)} if self.quantizes_activations else {}
            config["config_groups"] = {"group_0": {**activations, "weights": number, "targets": ["Linear"]}}
        config["ignore"] = list(self.exclude_modules) if self.quant_algo is not None else []
        if self.quant_algo is not None:
            config["quant_algo"] = self.quant_algo
        if self.kv_cache_quant_algo is not None:
            config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return {**config, "producer": _PRODUCER, "quant_method": "modelopt"}


def read_quantization(top: JsonObject) -> QuantizationConfig | None:
    """What a parsed `config.json` says, or `hf_quant_config.json` beside it where that says nothing.

    Older exports of ModelOpt have the second file only.

    Raises:
        UserError: it names a method or a format that is not supported.
    """
    if QUANTIZATION_KEY in top:
        return _from_config(top.object(QUANTIZATION_KEY))
    beside = top.path.parent / QUANT_CONFIG_FILE
    return read_hf_quant_config(beside) if is_file(beside) else None


def read_hf_quant_config(path: Path) -> QuantizationConfig:
    """What a `hf_quant_config.json` says.

    Raises:
        UserError: the file is damaged, or names a format that is not supported.
    """
    quantization = JsonObject.from_file(path).object("quantization")
    return QuantizationConfig(
        _quant_algo(quantization),
        _kv_cache_quant_algo(quantization, "kv_cache_quant_algo"),
        quantization.texts("exclude_modules") if "exclude_modules" in quantization else (),
    )


def _from_config(config: JsonObject) -> QuantizationConfig:
    if config.text("quant_method") != "modelopt":
        raise config.error("quant_method", 'not supported; supported is "modelopt", what `dflash-trt convert` writes')
    scheme = config.values.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        bits = (scheme.get("type"), scheme.get("num_bits"))
        if bits != ("float", 8):
            raise config.error("kv_cache_scheme", "not supported; supported are float numbers of 8 bits")
    kv_cache: KVCacheQuantAlgo | None = (
        "FP8" if isinstance(scheme, dict) else _kv_cache_quant_algo(config, "kv_cache_scheme")
    )
    return QuantizationConfig(
        _quant_algo(config),
        kv_cache,
        config.texts("ignore") if "ignore" in config else (),
    )


def _quant_algo(place: JsonObject) -> QuantAlgo | None:
    if "quant_algo" not in place:
        return None
    found = place.text("quant_algo")
    if found not in get_args(QuantAlgo):
        raise place.error("quant_algo", f"not supported; supported are {', '.join(get_args(QuantAlgo))}")
    if found != "FP8" and "group_size" in place and place.integer("group_size") != NVFP4_GROUP_SIZE:
        raise place.error("group_size", f"must be {NVFP4_GROUP_SIZE}")
    return cast(QuantAlgo, found)


def _kv_cache_quant_algo(place: JsonObject, key: str) -> KVCacheQuantAlgo | None:
    if key not in place:
        return None
    if place.text(key) not in get_args(KVCacheQuantAlgo):
        raise place.error(key, f"not supported; supported are {', '.join(get_args(KVCacheQuantAlgo))}")
    return cast(KVCacheQuantAlgo, place.text(key))
