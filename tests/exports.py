"""Checkpoints that ModelOpt exports, of random models too small to be slow."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def model_of(family: str) -> Any:
    """A random model in BF16: `llama`, or `qwen3_moe`, which has experts."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])).bfloat16()
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, architectures=["Qwen3MoeForCausalLM"])
    return Qwen3MoeForCausalLM(config).bfloat16()


class Exports(dict[str, Path]):
    """Directories by "family preset", each exported when first asked for.

    Behind the preset, "kv" for a cache in FP8, "kv_cast" for one whose scales are all 1.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, key: str) -> Path:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        family, preset, *cache = key.split()
        config = deepcopy(getattr(mtq, preset))
        if cache:
            config["quant_cfg"] += deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        if cache == ["kv_cast"]:
            config["quant_cfg"][-1]["cfg"]["use_constant_amax"] = True
        model = model_of(family)
        mtq.quantize(model, config, lambda model: model(torch.arange(32)[None]))
        self[key] = self.root / key.replace(" ", "-")
        export_hf_checkpoint(model, export_dir=self[key])
        return self[key]
