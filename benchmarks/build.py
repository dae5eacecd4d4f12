"""Time, memory and size of building TensorRT engines of Qwen3-8B's dimensions in NVFP4, with a drafter, on no GPU.

    python benchmarks/build.py

All 36 layers with taps, embedding and head, and the 5 layers of its drafter; packed weights are one block of random
bytes, repeated from another place for each tensor. `dflash-trt build` runs as a user would run it; its memory and that
of its workers is read five times a second, what processes allocated apart from files that are mapped and can be read
again. Needs 20 GB of disk. Writes the table of docs/performance.md to stdout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from shapes import qwen3_8b
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt.checkpoint.quantization_config import QuantizationConfig
from dflash_trt.checkpoint.safetensors_writer import TensorSpec, write_safetensors
from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.engine.directory import open_engine
from dflash_trt.examples.smollm2 import gguf_file
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK

DRAFTER_LAYERS, BLOCK = 5, 16
SCALE = 0.01
NOISE = 1 << 26
LARGEST_SCALE = 0x60
"""Code of an e4m3 number well below the largest."""


@dataclass
class Peak:
    """Bytes at the worst moment of a build, all of its processes together."""

    allocated: int = 0
    mapped: int = 0


def tensors_of_target(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes, unquantized."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Qwen3ForCausalLM(config).state_dict().items()}


def tensors_of_drafter(target: Mapping[str, tuple[int, ...]], hidden: int, taps: int) -> dict[str, tuple[int, ...]]:
    """A drafter's layers have the target's shapes."""
    prefix = "model."
    layers = tuple(f"{prefix}layers.{layer}." for layer in range(DRAFTER_LAYERS))
    kept = {name.removeprefix(prefix): shape for name, shape in target.items() if name.startswith(layers)}
    return {**kept, "fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], excluded: tuple[str, ...]
) -> None:
    """Write random NVFP4 weights for all matrices but those excluded; a tensor is held at a time."""
    directory.mkdir(parents=True)
    quantization = QuantizationConfig("NVFP4", None, excluded)
    specs: list[TensorSpec] = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 1 or quantization.algo_of(module) is None or "embed_tokens" in name:
            specs.append(TensorSpec(name, torch.bfloat16, shape))
            continue
        rows, columns = shape
        specs += [
            TensorSpec(name, torch.uint8, (rows, columns // 2)),
            TensorSpec(f"{module}.weight_scale", torch.float8_e4m3fn, (rows, columns // NVFP4_BLOCK)),
            TensorSpec(f"{module}.weight_scale_2", torch.float32, ()),
            TensorSpec(f"{module}.input_scale", torch.float32, ()),
        ]
    write_safetensors(directory / "model.safetensors", specs, _values(specs))
    content = {**config, "quantization_config": quantization.to_quantization_config()}
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "hf_quant_config.json").write_text(json.dumps(quantization.to_hf_quant_config()))


def _values(specs: list[TensorSpec]) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (NOISE,), generator=generator, dtype=torch.uint8)
    floats = (torch.randn(NOISE // 4, generator=generator) * 0.02).bfloat16()
    for index, spec in enumerate(specs):
        if spec.dtype == torch.float32:
            yield torch.tensor(SCALE)
        elif spec.dtype == torch.bfloat16:
            yield _repeated(floats, spec, index)
        elif spec.dtype == torch.uint8:
            yield _repeated(noise, spec, index)
        else:
            yield _repeated(noise, spec, index).clamp(1, LARGEST_SCALE).view(torch.float8_e4m3fn)


def _repeated(values: torch.Tensor, spec: TensorSpec, index: int) -> torch.Tensor:
    """Values for a tensor, from another place for each one."""
    count = torch.Size(spec.shape).numel()
    return values.roll(7919 * index).repeat(-(-count // len(values)))[:count].view(spec.shape)


def write_pair(directory: Path, layers: int, vocab_size: int) -> None:
    """Write target and drafter."""
    config = qwen3_8b(layers, vocab_size)
    shapes = tensors_of_target(config)
    target = {**config.to_dict(), "torch_dtype": "bfloat16"}
    write_checkpoint(directory / "target", target, shapes, ("lm_head",))
    save_tokenizer(gguf_file(), directory / "target")
    taps = [round(i * (layers - 1) / 4) for i in range(5)]
    drafter = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": DRAFTER_LAYERS,
        "layer_types": ["full_attention"] * DRAFTER_LAYERS,
        "num_target_layers": layers,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": taps},
    }
    write_checkpoint(directory / "drafter", drafter, tensors_of_drafter(shapes, 4096, len(taps)), ("fc",))


def watched(command: list[str]) -> tuple[float, Peak]:
    """Run a command; its seconds, and the memory of its processes at its worst moment."""
    started, peak = time.perf_counter(), Peak()
    with subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            allocated = mapped = 0
            with suppress(psutil.Error):
                for each in (root, *root.children(recursive=True)):
                    with suppress(psutil.Error, OSError):
                        status = _status(each.pid)
                        allocated, mapped = allocated + status.get("RssAnon", 0), mapped + status.get("RssFile", 0)
            if allocated > peak.allocated:
                peak = Peak(allocated, mapped)
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(process.returncode)
    return time.perf_counter() - started, peak


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in lines if "Rss" in line)
    }


@click.command()
@click.option("--layers", type=click.IntRange(5), default=36, show_default=True, help="Of the target.")
@click.option("--vocab_size", type=click.IntRange(1000), default=151936, show_default=True, help="Of both models.")
@click.option("--max_seq_len", type=click.IntRange(2), default=8192, show_default=True, help="As `build` takes it.")
@click.option("--directory", type=click.Path(path_type=Path), help="Where to work; kept.  [default: a temporary one]")
def main(layers: int, vocab_size: int, max_seq_len: int, directory: Path | None) -> None:
    """Build, and print a table."""
    with tempfile.TemporaryDirectory() as temporary:
        root = directory or Path(temporary)
        if not (root / "checkpoint").exists():
            write_pair(root / "checkpoint", layers, vocab_size)
        seconds, peak = watched(
            [str(Path(sys.executable).with_name("dflash-trt")), "build", "--checkpoint_dir", str(root / "checkpoint")]
            + ["--output_dir", str(root / "engine"), "--backend", "tensorrt_rtx", "--compute_capability", "sm120"]
            + ["--max_batch_size", "8", "--max_seq_len", str(max_seq_len)]
        )
        report(root, seconds, peak)


def report(root: Path, seconds: float, peak: Peak) -> None:
    """Print what it took, and what each plan holds beside its packed weights."""
    engine = open_engine(root / "engine").path
    print(f"| seconds | {seconds:.0f} |\n| peak allocated | {peak.allocated / 1e9:.2f} GB |")
    print(f"| mapped files at that moment | {peak.mapped / 1e9:.2f} GB |")
    for model in ("target", "drafter"):
        plan = (engine / model / "rank0.engine").stat().st_size
        packed = (root / "checkpoint" / model / "model.safetensors").stat().st_size
        print(f"| {model} plan / its checkpoint | {plan / 1e9:.3f} GB / {packed / 1e9:.3f} GB |")
    shared = (engine / "target" / "rank0.safetensors").stat().st_size
    print(f"| embedding and head, held once beside the plans | {shared / 1e9:.3f} GB |")


if __name__ == "__main__":
    main()
