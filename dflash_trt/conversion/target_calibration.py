"""A target's activations, calibrated by NVIDIA ModelOpt on transformers' model of the checkpoint."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_trt.checkpoint.open_checkpoint import TargetCheckpoint
from dflash_trt.conversion.calibration import (
    Calibration,
    Progress,
    calibration_dtype,
    checked_amax,
    describe,
    finite_weights,
    not_finite,
)
from dflash_trt.errors import UserError
from dflash_trt.models.pair import target_manifest

_PER_TENSOR = {"num_bits": (4, 3), "axis": None}
"""ModelOpt's FP8. Its NVFP4 is calibrated to the same magnitude, that of the whole tensor."""

_OBSERVERS = {"input_quantizer": "input", "k_bmm_quantizer": "keys", "v_bmm_quantizer": "values"}
"""ModelOpt's modules beside a layer that see what is calibrated, and what that is."""


def calibrate_target(
    target: TargetCheckpoint,
    samples: list[list[int]],
    modules: Collection[str],
    *,
    kv_cache: bool,
    progress: Progress = lambda count: None,
) -> Calibration:
    """Run samples through an unquantized target, one at a time, and take the largest magnitudes.

    They are those of ModelOpt's `mtq.quantize` with FP8_DEFAULT_CFG or NVFP4_DEFAULT_CFG (and FP8_KV_CFG) on
    `AutoModelForCausalLM.from_pretrained(..., dtype="auto")`, to the bit. The weights stay mapped from the file; those
    of a GGUF file are unpacked in memory.

    Args:
        target: the checkpoint.
        samples: token ids, each at least one.
        modules: linear layers whose inputs are wanted, `model.layers.0.mlp.up_proj` for one.
        kv_cache: keys and values of every layer are wanted too.
        progress: told of every sample.

    Raises:
        UserError: ModelOpt is not installed, the checkpoint is damaged or quantized, or a layer's input, keys or values
            are not finite or nothing but zero.
    """
    if target.config.quantization is not None:
        raise UserError(f"{target.path}: is quantized already; give the checkpoint that it was made from")
    modelopt = _modelopt()
    dtype = calibration_dtype(target)
    layers = range(target.config.num_hidden_layers if kv_cache else 0)
    attentions = [f"model.layers.{layer}.self_attn" for layer in layers]
    quantizers = {
        what: {name: f"{name}.{kind}" for name in (modules if what == "input" else attentions)}
        for kind, what in _OBSERVERS.items()
    }

    def run_samples(model: Any) -> None:
        # Also those that are not wanted: ModelOpt has them all observe.
        for quantizer, module in model.named_modules():
            name, _, kind = quantizer.rpartition(".")
            if kind in _OBSERVERS:
                refuse = partial(_refuse_not_finite, target.path, f"the {_OBSERVERS[kind]} of {name}")
                module.register_forward_pre_hook(refuse)
        # A head that is not calibrated has no use for the hidden states of all tokens, nor memory for their logits.
        logits = 0 if "lm_head" in modules else 1
        for ids in samples:
            model(torch.tensor([ids]), use_cache=False, logits_to_keep=logits)
            progress(1)

    with _quiet(), torch.no_grad():
        model = _model(target, dtype)
        modelopt.torch.quantization.quantize(model, _config(kv_cache), run_samples)
    found = {
        what: checked_amax(
            {name: model.get_submodule(quantizer).amax for name, quantizer in named.items()}, what, target.path
        )
        for what, named in quantizers.items()
    }
    method = describe(f"ModelOpt {modelopt.__version__}'s max calibration", dtype, samples)
    return Calibration(found["input"], found["keys"], found["values"], method)


def _config(kv_cache: bool) -> dict[str, Any]:
    """Nothing of ModelOpt's but what observes activations: weights are quantized elsewhere."""
    patterns = ["*input_quantizer", *(["*[kv]_bmm_quantizer"] if kv_cache else [])]
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            *({"quantizer_name": pattern, "cfg": _PER_TENSOR} for pattern in patterns),
        ],
        "algorithm": "max",
    }


def _model(target: TargetCheckpoint, dtype: torch.dtype) -> Any:
    """transformers' model around the checkpoint's own tensors, whichever kind of file holds them."""
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(**target.config.to_dict()), dtype=dtype)
    weights = dict(finite_weights(target_manifest(target), dtype))
    if target.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    # Its frequencies come from the config and are no weights, so they are still on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval().requires_grad_(False)


def _refuse_not_finite(path: Path, what: str, quantizer: Any, arguments: tuple[torch.Tensor, ...]) -> None:
    """Before ModelOpt does, which does not say where."""
    if not bool(torch.isfinite(arguments[0]).all()):
        raise not_finite(path, what, arguments[0].dtype)


def _modelopt() -> Any:
    try:
        with _quiet():
            importlib.import_module("modelopt.torch.quantization")
            return importlib.import_module("modelopt")
    except ImportError as error:
        raise UserError(f"calibration needs NVIDIA ModelOpt ({error}): pip install dflash-trt[quantize]") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """ModelOpt prints what it inserts, and warns of versions of transformers that it was not tried with."""
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
