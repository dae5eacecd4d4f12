"""Engines of real sizes, really built for SM120: a real model, and ranks of one that no machine of tests holds."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_trt import __version__
from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats
from dflash_trt.engine.build import plan_build
from dflash_trt.engine.config import BuildConfig, Builder, EngineConfig
from dflash_trt.engine.network import record_drafter, record_target
from dflash_trt.engine.plans import open_plans
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import Record, build_plan
from dflash_trt.examples.smollm2 import DRAFTER, gguf_file
from dflash_trt.models import dflash
from dflash_trt.models.pair import Pair, load_target
from dflash_trt.models.rotary import rotary_table
from dflash_trt.models.sharding import REPLICATED, Sharding, local_shape
from dflash_trt.ops.base import Linear
from dflash_trt.quantization.nvfp4 import NVFP4Tensor
from tests.tensorrt_engines import TEXT

KERNELS_OF_A_LAYER = 3_500_000
"""Bytes, at most: what a plan of tiny layers takes for each."""
CPU = torch.device("cpu")
BLOCK = 1 << 16
"""Numbers of a weight that differ; whole ones would take minutes to draw."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
DRAFTER_8B = {
    **LLAMA_8B,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "block_size": 10,
    "dflash_config": {"mask_token_id": 128255, "target_layer_ids": [0, 1]},
}


def test_smollm2_in_nvfp4(tmp_path: Path) -> None:
    """Its plan holds the packed weights once, and kernels of every layer for two profiles."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXT))
    formats, kept = Formats("nvfp4"), Formats("bf16")
    target, drafter = open_target(gguf_file()), open_drafter(DRAFTER)
    data = CalibrationData(text, size=1, max_length=16)
    plan_conversion(target, formats, drafter, kept, data, tmp_path / "checkpoint").run()
    checkpoints = open_target(tmp_path / "checkpoint/target"), open_drafter(tmp_path / "checkpoint/drafter")
    config = BuildConfig(dtype="bfloat16", max_batch_size=4, max_seq_len=256)
    plan = plan_build(*checkpoints, config, tmp_path / "engine", "tensorrt_rtx", "sm120")
    plans = open_plans(plan.write(), 0)
    packed = sum(spec.nbytes for spec in plan.target.specs if "embed" not in spec.name)
    context = sum(spec.nbytes for spec in plan.drafter.specs)  # of which the target's engine holds some
    kernels = KERNELS_OF_A_LAYER * target.config.num_hidden_layers
    assert packed < plans.records["target"].size < packed + context + kernels


@dataclass(frozen=True)
class Random:
    """A `WeightLoader` of a rank's part of a model: for each weight a random block, repeated."""

    ranks: int
    unquantized: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by name, as far as they were asked for."""

    def tensor(self, name: str, shape: tuple[int, ...], sharding: Sharding = REPLICATED) -> Tensor:
        return self.filled(name, shape, sharding, torch.randn(BLOCK, generator=seeded(name)).bfloat16())

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError(f"{name} is of a drafter with a head of its own")

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
    ) -> Linear:
        assert not bias
        if name in self.unquantized:
            return Linear(self.tensor(name, (out_features, in_features), sharding))
        codes = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8, generator=seeded(name))
        scales = torch.randint(1, 120, (BLOCK,), dtype=torch.uint8, generator=seeded(f"{name} scales"))
        weight = NVFP4Tensor(
            self.filled(name, (out_features, in_features // 2), sharding, codes),
            self.filled(f"{name} scales", (out_features, in_features // 16), sharding, scales).view(
                torch.float8_e4m3fn
            ),
            self.scale(name),
        )
        return Linear(weight, None, self.scale(name))

    def filled(self, name: str, shape: tuple[int, ...], sharding: Sharding, block: Tensor) -> Tensor:
        local = torch.Size(local_shape(shape, sharding, self.ranks))
        self.sizes[name] = local.numel() * block.element_size()
        return block.repeat(-(-local.numel() // BLOCK))[: local.numel()].view(local)

    def scale(self, name: str) -> Tensor:
        return torch.tensor(0.01)

    def ignore(self, name: str) -> None:
        pass

    def bytes_of(self, *parts: str) -> int:
        return sum(size for name, size in self.sizes.items() if any(part in name for part in parts))


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


@pytest.mark.parametrize("record", [record_target, record_drafter])
def test_ranks_of_eight(record: Record, tmp_path: Path) -> None:
    """Of Llama-3.1-8B's dimensions, two layers of it, in NVFP4; their plans hold the packed weights once."""
    quantization = {
        "target": QuantizationConfig("NVFP4", None, ("lm_head",)),
        "drafter": QuantizationConfig("NVFP4", None, ("fc",)),
    }
    for name, content in (("target", LLAMA_8B), ("drafter", DRAFTER_8B)):
        (tmp_path / name).mkdir()
        declared = {**content, "quantization_config": quantization[name].to_quantization_config()}
        (tmp_path / name / "config.json").write_text(json.dumps(declared))
    target = TargetConfig.from_pretrained(tmp_path / "target")
    drafter = DrafterConfig.from_pretrained(tmp_path / "drafter")
    build = BuildConfig(dtype="bfloat16", max_batch_size=8, max_seq_len=4096, tp_size=8)
    tensorrt = load_tensorrt("tensorrt_rtx")
    builder = Builder("tensorrt_rtx", tensorrt.version, "sm120", None)
    config = EngineConfig(__version__, target, drafter, build, builder, "of a test")
    positions = build.max_seq_len + drafter.block_size
    of_target, of_drafter = Random(8, ("lm_head",)), Random(8, ("fc",))
    pair = Pair(
        target,
        drafter,
        load_target(of_target, target),
        dflash.load(of_drafter, drafter),
        rotary_table(target.rope, positions, torch.bfloat16, CPU),
        rotary_table(drafter.rope, positions, torch.bfloat16, CPU),
    )
    held, layers = of_drafter.bytes_of("_proj"), drafter.num_hidden_layers
    if record is record_target:
        held = of_target.bytes_of("_proj") + of_drafter.bytes_of("fc", "k_proj", "v_proj")
        layers = target.num_hidden_layers + drafter.num_hidden_layers
    tables = positions * (target.head_dim + drafter.head_dim) * 4
    plans = {}
    for rank in (0, 7):
        pieces: list[bytes] = []
        build_plan(tensorrt, record, pair, config, rank, pieces.append)
        plans[rank] = b"".join(pieces)
        assert held < len(plans[rank]) < held + tables + KERNELS_OF_A_LAYER * (layers + 1)
    assert plans[0] != plans[7]
