"""The real model of the demo: its known answers, and what it takes to build and run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import Build, plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.errors import UserError
from dflash_trt.examples.smollm2 import DRAFTER, gguf_file, write_bfloat16_checkpoint
from dflash_trt.runtime.sampling import SamplingParams
from tests.conftest import build_pair

# Answers of transformers 5.24 in float32 to questions that the drafter was not trained on, from benchmarks/data.
ANSWERS = json.loads((Path(__file__).parent / "smollm2_answers.json").read_text())
MEGABYTE = 2**20


@pytest.mark.parametrize(("window", "ranks"), [(1, 1), (8, 1), (8, 3)])
def test_known_answers(tmp_path: Path, window: int, ranks: int) -> None:
    write_bfloat16_checkpoint(tmp_path / "target")
    params = [SamplingParams(max_tokens=len(row["output_ids"])) for row in ANSWERS]
    options = {"dtype": "float32", "max_seq_len": 256, "tp_size": ranks}
    with build_pair(tmp_path / "engine", tmp_path / "target", DRAFTER, **options) as llm:
        outputs = llm.generate([row["prompt_ids"] for row in ANSWERS], params, verify_window=window)
    assert [output.outputs[0].token_ids for output in outputs] == [row["output_ids"] for row in ANSWERS]


def peak_memory(code: str, *arguments: object) -> int:
    """Peak resident bytes of a Python process that runs `code`, mapped weights included.

    VmHWM, since `ru_maxrss` begins with what the parent process had.
    """
    report = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    command = [sys.executable, "-c", code + report, *map(str, arguments)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(output.splitlines()[-1]) * 1024


def test_memory(tmp_path: Path) -> None:
    """Building from the GGUF file and running, float32: each under 1.5 GB, with weights of 587 MB held once."""
    build = (
        "import sys; from pathlib import Path\n"
        "from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target\n"
        "from dflash_trt.engine.build import build_engine\n"
        "from dflash_trt.engine.config import BuildConfig\n"
        "from dflash_trt.examples.smollm2 import DRAFTER, gguf_file\n"
        "config = BuildConfig(dtype='float32', max_batch_size=1, max_seq_len=512)\n"
        "build_engine(open_target(gguf_file()), open_drafter(DRAFTER), config, Path(sys.argv[1]))"
    )
    run = (
        "import sys; from dflash_trt.runtime.llm import LLM; from dflash_trt.runtime.sampling import SamplingParams\n"
        "LLM(sys.argv[1], device='cpu').generate(['def'], SamplingParams(max_tokens=8))"
    )
    idle = "import torch, transformers; from dflash_trt.runtime.llm import LLM"
    peaks = [peak_memory(code, tmp_path / "engine") for code in (build, run)]
    assert max(peaks) < 1500 * MEGABYTE
    weights = sum(file.stat().st_size for file in (tmp_path / "engine").rglob("*.safetensors"))
    # The rest is caches, activations and libraries' buffers; a second copy of the weights would not fit.
    assert peaks[1] - peak_memory(idle) < weights + 250 * MEGABYTE


def test_ranks(tmp_path: Path) -> None:
    """Nine heads and three key-value heads, 1536 rows of MLP and 49152 tokens: three ranks need no padding, nine do."""
    target, drafter = open_target(gguf_file()), open_drafter(DRAFTER)

    def plan(ranks: int) -> Build:
        return plan_build(target, drafter, BuildConfig("float32", max_seq_len=256, tp_size=ranks), tmp_path / "engine")

    assert [plan(ranks).target.padding(ranks) for ranks in (1, 3)] == [{}, {}]
    assert plan(9).target.padding(9) == {"vocab_size": (49152, 49158), "intermediate_size": (1536, 1539)}
    assert plan(3).config.cache_bytes * 3 == plan(1).config.cache_bytes
    with pytest.raises(
        UserError, match=r"^tp_size is 2, which does not divide num_attention_heads, 9 in .*; 1, 3 or 9"
    ):
        plan(2)
