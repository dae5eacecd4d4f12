"""Engines of models that users have: SmolLM2 whole, and two layers of Llama-3.1-8B on the first and last of 8 ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats
from dflash_trt.engine.build import Build, plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.directory import Engine, write_config
from dflash_trt.engine.memory import predict_memory
from dflash_trt.engine.plans import open_plans
from dflash_trt.engine.rank_build import build_rank
from dflash_trt.examples.smollm2 import DRAFTER, gguf_file
from tests.tiny_models import save_tokenizer

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)


def planned(root: Path, **options: int) -> Build:
    target, drafter = open_target(root / "target"), open_drafter(root / "drafter")
    config = BuildConfig("bfloat16", max_batch_size=4, **options)
    return plan_build(target, drafter, config, root / "engine", "tensorrt_rtx", "sm120")


def test_smollm2(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def reverse(text): return text[::-1]\n")
    data, formats = CalibrationData(tmp_path / "text.txt", size=1, max_length=32), Formats("nvfp4")
    pair = tmp_path / "pair"
    plan_conversion(open_target(gguf_file()), formats, open_drafter(DRAFTER), formats, data, pair).run()
    build = planned(pair, max_seq_len=2048)
    plans = open_plans(build.write(), 0)
    unpacked = 106_000_000 * 2
    assert predict_memory(build).target_weights < plans.records["target"].size < unpacked
    assert plans.shared.shape("embedding") == (49152, 576)


def test_layers_of_llama_8b_on_8_ranks(tmp_path: Path) -> None:
    """Each builds its part: a key-value head, and an eighth of everything else."""
    write_llama(tmp_path)
    build = planned(tmp_path, max_seq_len=8192, tp_size=8)
    engine, parts = Engine(tmp_path / "e", build.config), Engine(tmp_path / "parts", build.config)
    for file in (*engine.tensorrt_files(0), *parts.rank_files(0)):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_config(engine.path, build.config)
    predicted = predict_memory(build)
    for rank in (0, 7):
        for file, part in zip(parts.rank_files(rank), (build.target, build.drafter), strict=True):
            build._write_file(file, part, rank, lambda size: None)
        build_rank(engine, parts.path, rank)
        plans = open_plans(engine, rank)
        size = plans.records["target"].size
        assert predicted.target_weights < size < predicted.target_weights + 20_000_000
        assert plans.shared.shape("embedding") == plans.shared.shape("head") == (128256 // 8, 4096)
        assert not any(file.exists() for file in parts.rank_files(rank))


def write_llama(root: Path) -> None:
    """Target and drafter; packed weights are noise, embedding and head zeros."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(LLAMA).state_dict().items()}
    write_checkpoint(root / "target", LLAMA.to_dict(), shapes, ("lm_head",))
    save_tokenizer(root / "target", 259)
    layer = {name.removeprefix("model."): shape for name, shape in shapes.items() if ".layers.0." in name}
    norms = {f"layers.0.self_attn.{part}_norm.weight": (128,) for part in "qk"}
    rest = {"fc.weight": (4096, 2 * 4096), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    config = {
        **LLAMA.to_dict(),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "num_target_layers": 2,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 128255, "target_layer_ids": [0, 1]},
    }
    write_checkpoint(root / "drafter", config, {**layer, **norms, **rest}, ("fc",))


def write_checkpoint(
    directory: Path, config: dict[str, object], shapes: dict[str, tuple[int, ...]], excluded: tuple[str, ...]
) -> None:
    directory.mkdir()
    quantization = QuantizationConfig("NVFP4", None, excluded)
    specs: list[TensorSpec] = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 1 or "embed_tokens" in name or quantization.algo_of(module) is None:
            specs.append(TensorSpec(name, torch.bfloat16, shape))
        else:
            specs += [
                TensorSpec(name, torch.uint8, (shape[0], shape[1] // 2)),
                TensorSpec(f"{module}.weight_scale", torch.float8_e4m3fn, (shape[0], shape[1] // 16)),
                TensorSpec(f"{module}.weight_scale_2", torch.float32, ()),
                TensorSpec(f"{module}.input_scale", torch.float32, ()),
            ]
    write_safetensors(directory / "model.safetensors", specs, values(specs))
    content = {**config, "quantization_config": quantization.to_quantization_config()}
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "hf_quant_config.json").write_text(json.dumps(quantization.to_hf_quant_config()))


def values(specs: list[TensorSpec]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for spec in specs:
        if spec.dtype == torch.uint8:
            yield torch.randint(0, 256, spec.shape, generator=generator, dtype=torch.uint8)
        elif spec.dtype == torch.float8_e4m3fn:
            yield torch.randint(1, 96, spec.shape, generator=generator, dtype=torch.uint8).view(spec.dtype)
        else:
            yield torch.full(spec.shape, 0.01 if spec.dtype == torch.float32 else 0.0, dtype=spec.dtype)
