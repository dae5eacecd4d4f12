"""TensorRT engines, really built for SM120 on a machine with no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.conversion.convert import CalibrationData, plan_conversion
from dflash_trt.conversion.plan import Formats, QFormat
from dflash_trt.engine.build import build_engine, plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.memory import predict_memory
from dflash_trt.engine.plans import open_plans
from dflash_trt.engine.processes import environment_of_children
from dflash_trt.engine.rank_build import build_rank
from dflash_trt.engine.rank_builders import BuilderOptions, BuildFailed, RankProgress
from dflash_trt.engine.tensorrt_api import load_tensorrt
from dflash_trt.engine.tensorrt_build import TimingCache
from dflash_trt.errors import UserError
from tests.conftest import TINY
from tests.tensorrt_engines import OPTIONS, TEXT, TensorRTEngines
from tests.tiny_models import random_drafter, random_target

PLAN_OVERHEAD = 16_000_000
"""Bytes of a plan that are no weights, at most; those of kernels."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("qformat", ["bf16", "fp8", "nvfp4"])
def test_engines_are_built(tensorrt_engines: TensorRTEngines, tmp_path: Path, qformat: str, ranks: int) -> None:
    """Both of every rank, with the embedding that they share, and nothing else is left of the weights."""
    engine = tensorrt_engines.engine(qformat, ranks)
    files = {str(path.relative_to(engine.path)) for path in engine.path.rglob("*") if path.is_file()}
    of_ranks = {file for file in files if "/" in file}
    assert of_ranks == {
        f"{part}/rank{rank}.{kind}"
        for rank in range(ranks)
        for part, kind in (("target", "engine"), ("drafter", "engine"), ("target", "safetensors"))
    }
    assert not list(engine.path.parent.glob(f".{engine.path.name}*"))
    builder = engine.config.builder
    assert (builder.backend, builder.compute_capability) == ("tensorrt_rtx", "sm120")
    assert builder.version == load_tensorrt("tensorrt_rtx").version
    reference = tensorrt_engines.plan(qformat, tmp_path / "parts", tp_size=ranks)
    for rank in range(ranks):
        plans = open_plans(engine, rank)
        shared = load_file(plans.shared.path)
        assert list(shared) == ["embedding"]  # the tiny target ties its head
        expected = next(spec for spec in reference.target.specs if spec.name == "model.embed_tokens.weight")
        assert tuple(shared["embedding"].shape) == expected.shape and shared["embedding"].dtype == torch.bfloat16
        for which in ("target", "drafter"):
            with plans.read(which) as plan:
                assert len(plan) == plans.files[which].stat().st_size == plans.records[which].size
    assert len({open_plans(engine, rank).records["target"].sha256 for rank in range(ranks)}) == ranks


def test_shared_weights_are_the_checkpoints(tensorrt_engines: TensorRTEngines) -> None:
    """The ranks' parts of the embedding are together the checkpoint's, padded."""
    engine = tensorrt_engines.engine("bf16", 2)
    parts = [load_file(open_plans(engine, rank).shared.path)["embedding"] for rank in range(2)]
    whole = load_file(TINY / "target/model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(torch.cat(parts)[: len(whole)], whole.to(torch.bfloat16))


def test_progress(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> None:
    """Of each rank first the target's engine, then the drafter's; it grows to all of it."""
    told: list[RankProgress] = []
    written: list[int] = []
    build = tensorrt_engines.plan("bf16", tmp_path / "engine", tp_size=2)
    build.write(written.append, workers=2, options=BuilderOptions(told.append))
    assert sum(written) == build.weight_bytes
    for rank in range(2):
        of_rank = [each for each in told if each.rank == rank]
        assert [each.engine for each in of_rank] == sorted((each.engine for each in of_rank), reverse=True)
        for engine in ("target", "drafter"):
            done = [each.done for each in of_rank if each.engine == engine]
            assert done == sorted(done) and done[0] == 0 and done[-1] == 1 and len(done) > 5


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, UserError, "its build was ended by SIGKILL, which is what a system does that has no memory"),
        (signal.SIGTERM, BuildFailed, "its build was ended by SIGTERM"),
    ],
)
def test_a_builder_that_dies_fails_the_build(
    tensorrt_engines: TensorRTEngines, tmp_path: Path, number: signal.Signals, error: type[Exception], message: str
) -> None:
    """With its name, and the other one ends with it."""

    def kill(progress: RankProgress) -> None:
        if progress.rank == 1 and progress.done > 0:
            with suppress(psutil.NoSuchProcess):  # which a zombie is, too: it was told once already
                for process in builders():
                    if "1" in process.cmdline():
                        process.send_signal(number)

    build = tensorrt_engines.plan("bf16", tmp_path / "engine", tp_size=2)
    with pytest.raises(error, match=f"rank 1 of 2: {message}"):
        build.write(workers=2, options=BuilderOptions(kill))
    assert not builders() and not list(tmp_path.iterdir())


def test_what_a_builder_refuses_is_told(
    tensorrt_engines: TensorRTEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with TensorRT's own words; here a format that the rules let through."""
    monkeypatch.setattr("dflash_trt.engine.build.check_support", lambda *arguments: None)
    build = tensorrt_engines.plan("nvfp4", tmp_path / "engine", "sm89")
    with pytest.raises(UserError) as refused:
        build.write()
    assert "cannot build this network for sm89, it says: " in str(refused.value)
    assert "HW-specific datatypes: fp4_e2m1" in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = started_build(tmp_path / "engine")
    wait_until(lambda: builders(process))
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert not output and not list(tmp_path.iterdir())


def test_builders_end_with_the_build_that_started_them(tmp_path: Path) -> None:
    """Whatever way that ends."""
    process = started_build(tmp_path / "engine")
    children = wait_until(lambda: builders(process))
    process.kill()
    process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert gone and not alive


def test_an_engine_is_replaced_by_one_of_another_backend(tmp_path: Path, tensorrt_engines: TensorRTEngines) -> None:
    engine = tensorrt_engines.plan("bf16", tmp_path / "engine").write()
    assert open_plans(engine, 0).shared.metadata()["build_id"] == engine.config.build_id
    target, drafter = open_target(TINY / "target"), open_drafter(TINY / "drafter")
    rebuilt = build_engine(target, drafter, engine.config.build_config, tmp_path / "engine")
    assert not list(rebuilt.path.rglob("*.engine")) and rebuilt.config.build_id != engine.config.build_id


def test_a_timing_cache_goes_from_one_engine_to_the_next(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> None:
    """`tensorrt_rtx` takes one and measures nothing: the calls are those that `tensorrt` needs."""
    build = tensorrt_engines.plan("bf16", tmp_path / "engine")
    engine, parts = Engine(tmp_path, build.config), tmp_path / "parts"
    build.write_weights(parts)
    for file in engine.tensorrt_files(0):
        file.parent.mkdir(exist_ok=True)
    timing = TimingCache()
    with pytest.warns(DeprecationWarning, match="no-ops in TensorRT-RTX"):
        build_rank(engine, parts, 0, timing)
    assert timing.content
    open_plans(engine, 0)


def test_timing_caches_are_refused_where_nothing_is_timed(tensorrt_engines: TensorRTEngines, tmp_path: Path) -> None:
    build = tensorrt_engines.plan("bf16", tmp_path / "engine")
    for options in (BuilderOptions(timing_input=Path("x")), BuilderOptions(timing_output=Path("x"))):
        with pytest.raises(UserError, match=r"put_timing_cache is x, backend is tensorrt_rtx.*--backend tensorrt"):
            build.write(options=options)


def test_a_timing_cache_that_cannot_be_written_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    BuilderOptions(timing_output=tmp_path / "cache").check("tensorrt")
    with pytest.raises(UserError, match=r"missing/cache: cannot be written \(No such file or directory\)"):
        BuilderOptions(timing_output=tmp_path / "missing/cache").check("tensorrt")


SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def test_packed_weights_stay_packed(tmp_path: Path) -> None:
    """A plan takes little more than the weights that are in it, packed or not; the rest are kernels."""
    target = random_target(tmp_path / "bf16/target", **SIZES)
    random_drafter(tmp_path / "bf16/drafter", target, target_layer_ids=(0, 1))
    sizes = {}
    for name in ("bf16", "w4a16_nvfp4", "fp8", "nvfp4"):
        if name != "bf16":
            convert(tmp_path / "bf16", tmp_path / name, name)
        checkpoints = open_target(tmp_path / name / "target"), open_drafter(tmp_path / name / "drafter")
        build = plan_build(*checkpoints, BuildConfig(**OPTIONS), tmp_path / "engine", "tensorrt_rtx", "sm120")
        plans, memory = open_plans(build.write(), 0), predict_memory(build)
        sizes[name] = plans.records["target"].size
        assert memory.target_weights < sizes[name] < memory.target_weights + PLAN_OVERHEAD
    assert max(sizes["w4a16_nvfp4"], sizes["nvfp4"]) < 0.5 * sizes["bf16"]
    assert sizes["fp8"] < 0.75 * sizes["bf16"]


def convert(source: Path, output: Path, qformat: QFormat) -> None:
    """Weights alone are quantized without text; activations take some to calibrate their scales."""
    formats, data = Formats(qformat), None
    if qformat != "w4a16_nvfp4":
        text = source / "text.txt"
        text.write_text("\n".join(TEXT))
        data = CalibrationData(text, size=2, max_length=64)
    target, drafter = open_target(source / "target"), open_drafter(source / "drafter")
    plan_conversion(target, formats, drafter, formats, data, output).run()


def builders(parent: subprocess.Popen[str] | None = None) -> list[psutil.Process]:
    """The processes that build ranks for another process, or for this one."""
    found = psutil.Process(None if parent is None else parent.pid).children()
    alive = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in alive if "dflash_trt.engine.rank_build" in process.cmdline()]


def started_build(output: Path) -> subprocess.Popen[str]:
    # Which a shell that runs the tests in the background has switched off.
    ctrl_c = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{ctrl_c}; from dflash_trt.cli.main import main; main()"
    options = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-c", code, "build", "--checkpoint_dir", str(TINY), "--output_dir", str(output)]
        + ["--backend", "tensorrt_rtx", "--compute_capability", "sm120", "--tp_size", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment_of_children(1), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def wait_until(ready: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    while not (found := ready()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert os.getpid() not in [process.pid for process in found]
    return found
