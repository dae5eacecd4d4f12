"""Engines of several ranks: what their files hold together is the engine of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.engine.build import Build, plan_build
from dflash_trt.engine.config import BuildConfig
from dflash_trt.engine.directory import Engine
from dflash_trt.engine.weights import check_rank_files, open_weights
from dflash_trt.errors import UserError
from tests.conftest import QUANTIZED, TINY, Engines
from tests.models.test_dflash import as_speculators
from tests.tiny_models import random_drafter, random_target

CONFIG = BuildConfig(dtype="float64", max_seq_len=64)
ROWS = (".q_proj", ".k_proj", ".v_proj", ".gate_proj", ".up_proj", "embed_tokens", "lm_head")
COLUMNS = (".o_proj", ".down_proj")


def plan(pair: Path, tp_size: int, output: Path) -> Build:
    config = replace(CONFIG, tp_size=tp_size)
    return plan_build(open_target(pair / "target"), open_drafter(pair / "drafter"), config, output)


def checkpoints_of(llms: Engines, name: str) -> Path:
    llms[name]
    return TINY if name == "tiny" else llms.root / name


def files(engine: Engine) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Each rank's tensors of the target, then of the drafter."""
    ranks = range(engine.config.build_config.tp_size)
    for part in range(2):
        yield [load_file(engine.rank_files(rank)[part]) for rank in ranks]


def axis_of(name: str) -> int | None:
    """Which axis ranks divide, told from names alone."""
    layer, _, kind = name.rpartition(".")
    if kind not in ("weight", "weight_scale", "bias") or layer == "fc":
        return None
    if layer.endswith(ROWS):
        return 0
    return 1 if layer.endswith(COLUMNS) and kind != "bias" else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "tiny", *QUANTIZED])
def test_ranks_hold_the_whole(llms: Engines, tmp_path: Path, name: str, ranks: int) -> None:
    pair = checkpoints_of(llms, name)
    whole = plan(pair, 1, tmp_path / "whole").write()
    engine = plan(pair, ranks, tmp_path / "ranks").write(workers=2)
    for [expected], parts in zip(files(whole), files(engine), strict=True):
        for key, tensor in expected.items():
            held = [part[key] for part in parts]
            axis = axis_of(key) if tensor.ndim else None
            if axis is None and key.endswith(("o_proj.bias", "down_proj.bias")):
                assert same(held[0], tensor) and not any(bool(part.any()) for part in held[1:])
            elif axis is None:
                assert all(same(part, tensor) for part in held)
            else:
                if key.rpartition(".")[0].endswith((".k_proj", ".v_proj")) and ranks == 4:  # two heads, each for two
                    assert all(same(held[rank], held[rank + 1]) for rank in (0, 2))
                    held = held[::2]
                together = torch.cat([part.view(torch.uint8) if part.itemsize == 1 else part for part in held], axis)
                together = together.view(tensor.dtype)
                size = tensor.shape[axis]
                assert same(together.narrow(axis, 0, size), tensor)
                padding = together.narrow(axis, size, together.shape[axis] - size)
                block_scale = tensor.dtype == torch.float8_e4m3fn and key.endswith("weight_scale")
                assert bool((padding.float() == (1.0 if block_scale else 0.0)).all())
        assert all(part.keys() == expected.keys() for part in parts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "tiny", *QUANTIZED])
def test_every_rank_opens(llms: Engines, tmp_path: Path, name: str) -> None:
    engine = plan(checkpoints_of(llms, name), 4, tmp_path / "engine").write()
    check_rank_files(engine)
    for rank in range(4):
        open_weights(engine, rank)


def test_blocks_of_sixteen_stay_whole(llms: Engines, tmp_path: Path) -> None:
    """Five blocks of inputs for two ranks: each has three, one of them padding."""
    engine = plan(checkpoints_of(llms, "NVFP4"), 2, tmp_path / "engine").write()
    for rank in range(2):
        tensors = load_file(engine.rank_files(rank)[0])
        down, gate = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"
        assert tensors[f"{down}.weight"].shape == (48, 24) and tensors[f"{down}.weight_scale"].shape == (48, 3)
        assert tensors[f"{gate}.weight"].shape == (48, 24)
        assert tensors[f"{down}.weight_scale_2"].shape == tensors[f"{down}.input_scale"].shape == ()


def test_the_head_of_a_reduced_vocabulary_is_replicated(tmp_path: Path) -> None:
    random_drafter(tmp_path / "own", random_target(tmp_path / "target"))
    as_speculators(tmp_path / "own", tmp_path / "drafter", list(range(40)), torch.randn(40, 48))
    engine = plan(tmp_path, 4, tmp_path / "engine").write()
    drafters = [load_file(engine.rank_files(rank)[1]) for rank in range(4)]
    assert all(same(drafter["lm_head.weight"], drafters[0]["lm_head.weight"]) for drafter in drafters)
    assert drafters[0]["lm_head.weight"].shape == (40, 48)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share(tmp_path: Path, ranks: int) -> None:
    """Within 5% of what a division without padding and repeated heads would give."""
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 200, "num_key_value_heads": 4}
    random_drafter(tmp_path / "drafter", random_target(tmp_path / "target", **sizes))
    one, several = plan(tmp_path, 1, tmp_path / "engine"), plan(tmp_path, ranks, tmp_path / "engine")
    for whole, part in ((one.target, several.target), (one.drafter, several.drafter)):
        divided = {spec.name for spec in whole.specs if axis_of(spec.name) is not None}
        before, after = (sum(s.nbytes for s in p.specs if s.name in divided) for p in (whole, part))
        assert after == pytest.approx(before / ranks, rel=0.05)
        assert before > 10 * sum(s.nbytes for s in whole.specs if s.name not in divided | {"fc.weight"})


def test_padding_is_told(llms: Engines, tmp_path: Path) -> None:
    planned = plan(checkpoints_of(llms, "NVFP4"), 2, tmp_path / "engine")
    assert planned.target.padding(2) == {"vocab_size": (97, 98), "intermediate_size": (80, 96)}
    # One row of embedding and head; of two layers gate, up and down 16 rows or inputs of 48 in 4 bits and scales.
    assert planned.target.padding_bytes(2) == 2 * 48 * 8 + 2 * 3 * 16 * 48 * 9 // 16
    assert planned.drafter.padding(2) == {}
    one = plan(checkpoints_of(llms, "NVFP4"), 1, tmp_path / "engine")
    assert one.target.padding(1) == {} and one.target.padding_bytes(1) == 0
    full = sum(spec.nbytes for spec in one.target.specs if axis_of(spec.name) is not None)
    cut = sum(spec.nbytes for spec in planned.target.specs if axis_of(spec.name) is not None)
    assert 2 * cut - full == planned.target.padding_bytes(2)


@pytest.mark.parametrize(
    ("pair", "works", "refused"),
    [
        ("tiny", (1, 2, 4), {3: "num_attention_heads, 4", 8: "num_attention_heads, 4"}),
        ("smollm2", (1, 3, 9), {2: "num_attention_heads, 9", 4: "num_attention_heads, 9"}),
        ("uneven", (1, 2, 4, 8), {6: "num_attention_heads, 8", 16: "num_attention_heads, 8"}),
    ],
)
def test_sizes_that_work(tmp_path: Path, pair: str, works: tuple[int, ...], refused: dict[int, str]) -> None:
    if pair == "tiny":
        checkpoints = TINY
    else:
        heads = {"smollm2": (9, 3), "uneven": (8, 2)}[pair]
        sizes = {"hidden_size": 144, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
        random_drafter(tmp_path / "drafter", random_target(tmp_path / "target", **sizes))
        checkpoints = tmp_path
    for size in works:
        plan(checkpoints, size, tmp_path / "engine")
    for size, dimension in refused.items():
        with pytest.raises(UserError) as refusal:
            plan(checkpoints, size, tmp_path / "engine")
        expected = f"tp_size is {size}, which does not divide {dimension} in {checkpoints / 'target'}; "
        assert str(refusal.value) == f"{expected}{', '.join(map(str, works[:-1]))} or {works[-1]} would work"


def test_heads_fill_whole_blocks(llms: Engines, tmp_path: Path) -> None:
    """Of 4 heads of 8, two fill a block of o's 32 inputs: four ranks would cut it."""
    from tests.quantized_models import quantized_target

    model = quantized_target(tmp_path / "target", "NVFP4", head_dim=8, num_hidden_layers=2)
    random_drafter(tmp_path / "drafter", model, head_dim=16, num_hidden_layers=1, target_layer_ids=(0, 1))
    plan(tmp_path, 2, tmp_path / "engine").write()
    with pytest.raises(UserError, match=r"does not divide groups of attention heads that fill NVFP4 blocks, 2 in"):
        plan(tmp_path, 4, tmp_path / "engine")


def test_files_of_two_builds_and_missing_ones_are_refused(llms: Engines, tmp_path: Path) -> None:
    pair = checkpoints_of(llms, "llama")
    engine, other = (plan(pair, 2, tmp_path / name).write() for name in ("engine", "same"))
    check_rank_files(engine)
    assert other.config == engine.config, "the same files and options give the same engine"
    config = replace(CONFIG, tp_size=2, max_seq_len=65)
    other = plan_build(open_target(pair / "target"), open_drafter(pair / "drafter"), config, tmp_path / "other").write()
    file = engine.rank_files(1)[1]
    file.write_bytes(other.rank_files(1)[1].read_bytes())
    with pytest.raises(UserError) as refusal:
        check_rank_files(engine)
    ids = f"its build_id is {other.config.build_id}, config.json says {engine.config.build_id}"
    assert str(refusal.value) == f"{file}: is of another build: {ids}; build the engine again"
    file.unlink()
    with pytest.raises(UserError) as refusal:
        check_rank_files(engine)
    needed = f"tp_size is 2 in config.json, so {file.parent} must hold rank0.safetensors to rank1.safetensors"
    assert str(refusal.value) == f"{file}: is missing; {needed}"


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_of_ranks_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def fail(size: int) -> None:
        raise failure

    with pytest.raises(failure):
        plan(TINY, 4, tmp_path / "engine").write(fail, workers=3)
    assert not list(tmp_path.iterdir())
