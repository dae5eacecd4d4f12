"""How often rounding turns one token into another: speculative against plain decoding, by type.

    python benchmarks/exactness.py

In exact arithmetic the rate is zero (the tests hold it to that in float64). In narrower types a pass of another shape
sums in another order, and where two tokens are nearly equal the choice may fall otherwise. An output is compared up to
and including its first difference, since what follows continues another text. Writes the table of docs/exactness.md.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import get_args

import click
import torch
from rich.console import Console
from rich.progress import track

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats
from dflash_trt.engine.build import build_engine
from dflash_trt.engine.config import BuildConfig, Dtype
from dflash_trt.examples.smollm2 import CALIBRATION, DRAFTER, gguf_file
from dflash_trt.ops import torch_ops
from dflash_trt.runtime.llm import LLM
from dflash_trt.runtime.sampling import SamplingParams
from peers import TINY, held_out, set_threads

FORMATS = {
    "unquantized": None,
    "FP8": Formats("fp8"),
    "FP8, FP8 cache": Formats("fp8", "fp8"),
    "NVFP4": Formats("nvfp4"),
    "W4A16_NVFP4": Formats("w4a16_nvfp4"),
}
SMOLLM2 = (("float32", "unquantized"), ("bfloat16", "unquantized"), ("float32", "FP8"))


NARROW = ("float32", "bfloat16")


def engine(name: str, formats: str, dtype: Dtype, directory: Path) -> LLM:
    """A pair with its target in a format, computed in a type."""
    directories = {
        "tiny": (TINY / "target", TINY / "drafter", TINY / "calibration.jsonl"),
        "SmolLM2": (gguf_file(), DRAFTER, CALIBRATION),
    }
    target, drafter, text = directories[name]
    chosen = FORMATS[formats]
    if chosen is not None:
        weights_only = chosen.qformat == "w4a16_nvfp4"
        data = None if weights_only else CalibrationData(text, size=32, max_length=512)
        plan_conversion(open_target(target), chosen, None, Formats("bf16"), data, directory / "converted").run()
        target = directory / "converted/target"
    config = BuildConfig(dtype=dtype, max_batch_size=8, max_seq_len=512)
    build_engine(open_target(target), open_drafter(drafter), config, directory / "engine")
    return LLM(directory / "engine", device="cpu")


def compared(plain: list[int], other: list[int]) -> tuple[int, int]:
    """Tokens compared, and differences found: 0 or 1."""
    for index, (left, right) in enumerate(zip(plain, other, strict=False)):
        if left != right:
            return index + 1, 1
    return len(plain), 0


def decoded(llm: LLM, prompts: list[list[int]], temperature: float, batch: int, window: int) -> list[list[int]]:
    """Outputs of up to 96 tokens, prompt i with seed i, `batch` of them together."""
    params = [SamplingParams(max_tokens=96, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    outputs: list[list[int]] = []
    for start in track(range(0, len(prompts), batch), console=Console(stderr=True)):
        some = slice(start, start + batch)
        generation = llm.generate(prompts[some], params[some], verify_window=window)
        outputs += [output.outputs[0].token_ids for output in generation]
    return outputs


def rows(name: str, formats: str, llm: LLM, prompts: list[list[int]]) -> None:
    """The lines of one engine: plain decoding alone against the full window, alone and in batches of eight."""
    for temperature in (0.0, 1.0):
        plain = decoded(llm, prompts, temperature, 1, 1)
        for batch in (1, 8):
            speculative = decoded(llm, prompts, temperature, batch, llm.executor.max_window)
            pairs = [compared(left, right) for left, right in zip(plain, speculative, strict=True)]
            tokens, differences = (sum(counts) for counts in zip(*pairs, strict=True))
            click.echo(
                f"| {name} | {formats} | {llm.engine.config.build_config.dtype} | {temperature:.0f} | {batch} | "
                f"{tokens} | {differences} | {1000 * differences / tokens:.2f} |"
            )


@click.command()
@click.option("--threads", default=1, show_default=True)
@click.option(
    "--narrow_sums",
    is_flag=True,
    help="Sums of quantized layers in float32, as GPUs take them; tiny, FP8 and NVFP4 only.",
)
@click.option("--smollm2_prompts", default=10, show_default=True)
@click.option("--tiny_prompts", default=100, show_default=True)
def main(threads: int, narrow_sums: bool, smollm2_prompts: int, tiny_prompts: int) -> None:
    """Measure and print."""
    set_threads(threads)
    if narrow_sums:
        torch_ops._wide = lambda x, linear: torch.promote_types(x.dtype, torch.float32)
    click.echo(
        "| pair | target's format | type | temperature | batch | tokens | differences | per 1,000 tokens |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    rng = random.Random(0)
    prompts = {
        "tiny": [[rng.randrange(4, 500) for _ in range(rng.randint(2, 30))] for _ in range(tiny_prompts)],
        "SmolLM2": [prompt for prompt, _ in held_out()[:smollm2_prompts]],
    }
    with tempfile.TemporaryDirectory() as directory:
        for dtype in get_args(Dtype):
            for formats in FORMATS:
                for name in prompts:
                    if narrow_sums and (dtype not in NARROW or formats not in ("FP8", "NVFP4") or name != "tiny"):
                        continue
                    if name == "SmolLM2" and (dtype, formats) not in SMOLLM2:
                        continue  # minutes a prompt on a CPU
                    llm = engine(name, formats, dtype, Path(directory) / f"{name}-{formats}-{dtype}")
                    if narrow_sums:
                        llm.executor.verifier.model.ops = torch_ops.TorchOps()
                    rows(name, formats, llm, prompts[name])


if __name__ == "__main__":
    main()
