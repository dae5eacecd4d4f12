"""`dflash-trt inspect` on checkpoints that lie, each in one way, and on those of others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.cli import inspect as command
from dflash_trt.cli import progress as bars
from dflash_trt.inspection.describe import describe
from tests.cli.invoke import invoke
from tests.conftest import TINY
from tests.exports import Exports, model_of

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, Path], None]
UP = "model.layers.0.mlp.up_proj."
ATTENTION = "model.layers.1.self_attn."
NVFP4, FP8, W4A16 = "NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG", "W4A16_NVFP4_CFG"


def drop(*names: str) -> Change:
    def change(tensors: Tensors, directory: Path) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor | float) -> Change:
    def change(tensors: Tensors, directory: Path) -> None:
        tensors[name] = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)

    return change


def first_block(value: float) -> Change:
    def change(tensors: Tensors, directory: Path) -> None:
        scales = tensors[f"{UP}weight_scale"].float()
        scales[0, :2] = value
        tensors[f"{UP}weight_scale"] = scales.to(torch.float8_e4m3fn)

    return change


def unquantize(*modules: str) -> Change:
    """BF16 weights, without scales, where modules contain one of these texts."""

    def change(tensors: Tensors, directory: Path) -> None:
        weights = dict(model_of("llama").state_dict())
        for name in list(tensors):
            if any(text in name for text in modules):
                del tensors[name]
                weight = name.rpartition(".")[0] + ".weight"
                tensors[weight] = weights[weight]

    return change


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def beside(**changes: Any) -> Change:
    """Change `hf_quant_config.json`."""

    def change(tensors: Tensors, directory: Path) -> None:
        edit(directory / "hf_quant_config.json", lambda content: content["quantization"].update(changes))

    return change


def declare(**changes: Any) -> Change:
    """Change what `config.json` says, and remove the other file."""

    def change(tensors: Tensors, directory: Path) -> None:
        (directory / "hf_quant_config.json").unlink()
        edit(directory / "config.json", lambda content: content["quantization_config"].update(changes))

    return change


def undeclared(tensors: Tensors, directory: Path) -> None:
    (directory / "hf_quant_config.json").unlink()
    edit(directory / "config.json", lambda content: content.pop("quantization_config"))


def both(*changes: Change) -> Change:
    def change(tensors: Tensors, directory: Path) -> None:
        for one in changes:
            one(tensors, directory)

    return change


WEIGHTS = "model.safetensors: "
ALL = ("self_attn", "mlp")
LIES: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "nothing quantized": (
        NVFP4,
        both(unquantize(*ALL), declare(kv_cache_scheme=None)),
        (
            "proj.weight is BF16, 16.0 bits per parameter, and nothing is quantized",
            "declares NVFP4",
            "first of 14 such",
        ),
    ),
    "nothing quantized, all excluded": (
        NVFP4,
        both(unquantize(*ALL), declare(ignore=["*"], kv_cache_scheme=None)),
        ("config.json: NVFP4 is declared, but nothing is quantized",),
    ),
    "undeclared": (
        NVFP4,
        undeclared,
        (WEIGHTS, "proj.weight is NVFP4, 4.", "config.json declares no quantization of weights", "first of 14 such"),
    ),
    "declared unquantized": (
        FP8,
        declare(quant_algo=None),
        ("proj.weight is FP8, 8.0 bits", "declares no quantization of weights", "first of 14 such"),
    ),
    "another algorithm in the other file": (
        NVFP4,
        beside(quant_algo="FP8"),
        ('config.json: quantization_config says that quant_algo is "NVFP4", hf_quant_config.json', '"FP8"'),
    ),
    "unsupported algorithm in the other file": (
        NVFP4,
        beside(quant_algo="MIXED_PRECISION"),
        ('quant_algo is "NVFP4", hf_quant_config.json beside it "MIXED_PRECISION"',),
    ),
    "another cache in the other file": (
        f"{NVFP4} kv",
        beside(kv_cache_quant_algo=None),
        ('kv_cache_quant_algo is "FP8", hf_quant_config.json beside it null',),
    ),
    "fewer excluded in the other file": (
        NVFP4,
        beside(exclude_modules=["lm_head"]),
        ("/config.json: quantization_config.ignore names model.embed_tokens, hf_quant_config.json beside it does not",),
    ),
    "more excluded in the other file": (
        NVFP4,
        beside(exclude_modules=["lm_head", "model.embed_tokens", "a", "b"]),
        ("/hf_quant_config.json: quantization.exclude_modules names a, config.json beside it", "first of 2 such"),
    ),
    "no block scales": (
        NVFP4,
        drop(f"{UP}weight_scale"),
        (f"{WEIGHTS}{UP}weight_scale is missing; NVFP4 weights of [96, 64] need float8_e4m3fn [96, 4]",),
    ),
    "half the block scales": (
        NVFP4,
        lambda t, d: put(f"{UP}weight_scale", t[f"{UP}weight_scale"][:, :2].clone())(t, d),
        (f"{WEIGHTS}{UP}weight_scale has shape [96, 2]; NVFP4 weights of [96, 64] need float8_e4m3fn [96, 4]",),
    ),
    "block scales in BF16": (
        NVFP4,
        lambda t, d: put(f"{UP}weight_scale", t[f"{UP}weight_scale"].bfloat16())(t, d),
        (f"{WEIGHTS}{UP}weight_scale is bfloat16; NVFP4 weights of [96, 64] need float8_e4m3fn [96, 4]",),
    ),
    "rows that do not divide into blocks": (
        NVFP4,
        lambda t, d: put(f"{UP}weight", t[f"{UP}weight"][:, :20].clone())(t, d),
        (f"{WEIGHTS}{UP}weight has 40 values a row; NVFP4 needs a multiple of 16",),
    ),
    "no second scale": (
        NVFP4,
        drop(f"{UP}weight_scale_2"),
        (f"{WEIGHTS}{UP}weight_scale_2 is missing; NVFP4 weights of [96, 64] need float32 []",),
    ),
    "second scale of two numbers": (
        NVFP4,
        put(f"{UP}weight_scale_2", torch.ones(2)),
        (f"{UP}weight_scale_2 has shape [2]; NVFP4 weights of [96, 64] need float32 []",),
    ),
    "block scales of zero": (NVFP4, first_block(0), (f"{WEIGHTS}{UP}weight_scale has 2 of 384 zero",)),
    "block scales below zero": (NVFP4, first_block(-1), (f"{UP}weight_scale has 2 of 384 negative",)),
    "block scales of NaN": (NVFP4, first_block(float("nan")), (f"{UP}weight_scale has 2 of 384 not finite",)),
    "FP8 without scale": (FP8, drop(f"{UP}weight_scale"), (f"{UP}weight_scale is missing; FP8 weights of [96, 64]",)),
    "FP8 with a scale a row": (
        FP8,
        put(f"{UP}weight_scale", torch.ones(96, 1)),
        (f"{UP}weight_scale has shape [96, 1]; FP8 weights of [96, 64] need float32 []",),
    ),
    "FP8 with a scale of zero": (FP8, put(f"{UP}weight_scale", 0.0), (f"{UP}weight_scale is 0; a scale must be",)),
    "FP8 without input scale": (FP8, drop(f"{UP}input_scale"), (f"{WEIGHTS}{UP}input_scale is missing",)),
    "no input scale": (
        NVFP4,
        drop(f"{UP}input_scale"),
        (f"{WEIGHTS}{UP}input_scale is missing; NVFP4 weights of [96, 64] need float32 []",),
    ),
    "input scale of weights only": (
        W4A16,
        put(f"{UP}input_scale", 1.0),
        (f"{WEIGHTS}{UP}input_scale is there, but", "config.json declares W4A16_NVFP4, which quantizes weights only"),
    ),
    "one v_scale missing": (
        f"{NVFP4} kv",
        drop(f"{ATTENTION}v_proj.v_scale"),
        (f"{WEIGHTS}{ATTENTION}v_proj.v_scale is missing", f"declares FP8 caches, and {ATTENTION}k_proj.k_scale is"),
    ),
    "a cache scale of zero": (
        f"{NVFP4} kv",
        put(f"{ATTENTION}v_proj.v_scale", 0.0),
        (f"{ATTENTION}v_proj.v_scale is 0",),
    ),
    "an infinite cache scale": (
        f"{NVFP4} kv",
        put(f"{ATTENTION}k_proj.k_scale", float("inf")),
        (f"{ATTENTION}k_proj.k_scale is inf; a scale must be positive and finite",),
    ),
    "a cache scale a head": (
        f"{NVFP4} kv",
        put(f"{ATTENTION}k_proj.k_scale", torch.ones(2)),
        (f"{ATTENTION}k_proj.k_scale is float32 [2]; it must be float32 []",),
    ),
    "undeclared cache": (
        f"{FP8} kv",
        declare(kv_cache_scheme=None),
        ("_scale is there, but", "config.json declares no quantization of the cache", "first of 4 such"),
    ),
    "cache scales of nothing": (
        f"{FP8} kv",
        both(put("model.layers.2.self_attn.k_proj.k_scale", 1.0), put("model.layers.2.self_attn.v_proj.v_scale", 1.0)),
        ("model.layers.2.self_attn.k_proj.k_scale scales nothing: model.layers.2.self_attn has no weight",),
    ),
    "quantized and excluded": (
        NVFP4,
        declare(ignore=["lm_head", "model.embed_tokens", "*.up_proj"]),
        (f"{WEIGHTS}{UP}weight is NVFP4, 4.5 bits", 'config.json excludes "*.up_proj"', "first of 2 such"),
    ),
    "neither quantized nor excluded": (
        NVFP4,
        unquantize("layers.0.mlp.up_proj"),
        (f"{UP}weight is BF16, 16.0 bits", f"declares NVFP4 and does not exclude {UP[:-1]}"),
    ),
    "a head that nothing excludes": (
        NVFP4,
        declare(ignore=["model.embed_tokens"]),
        ("lm_head.weight is BF16", "does not exclude lm_head"),
    ),
    "scales without weight": (
        NVFP4,
        drop(f"{UP}weight"),
        (f"{WEIGHTS}{UP}", f"scales nothing: there is no {UP}weight", "first of 3 such"),
    ),
    "scales of an unquantized weight": (
        NVFP4,
        put("lm_head.input_scale", 1.0),
        (f"{WEIGHTS}lm_head.input_scale scales nothing: lm_head.weight is BF16",),
    ),
    **{
        f"{part} of {value}": (
            NVFP4,
            put(f"{UP}{part}", value),
            (f"{WEIGHTS}{UP}{part} is {value:g}; a scale must be positive and finite",),
        )
        for part in ("input_scale", "weight_scale_2")
        for value in (0.0, -0.5, float("inf"), float("nan"))
    },
}


def changed(source: Path, directory: Path, change: Change) -> Path:
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors, directory)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("lie", LIES)
def test_refuses_what_is_not_what_it_says(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: str
) -> None:
    preset, change, fragments = LIES[lie]
    directory = changed(exports[f"llama {preset}"], tmp_path / "checkpoint", change)
    result = invoke(capsys, "inspect", directory, "--format", "json")
    assert result.status == 2
    problems = json.loads(result.out)["problems"]
    assert len(problems) == 1 and str(directory) in problems[0]
    assert result.err == f"dflash-trt: {problems[0]}\n"
    for fragment in fragments:
        assert fragment in problems[0]


def test_refuses_fp8_that_says_it_is_nvfp4(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(exports[f"llama {NVFP4}"], directory)
    shutil.copy(exports[f"llama {FP8}"] / "model.safetensors", directory)
    result = invoke(capsys, "inspect", directory)
    assert result.status == 2 and "FP8" in result.out
    assert "proj.weight is FP8, 8.0 bits per parameter, but" in result.err
    assert "config.json declares NVFP4; the first of 14 such" in result.err


def test_every_problem_has_a_line(exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = both(drop(f"{ATTENTION}k_proj.k_scale", f"{ATTENTION}v_proj.v_scale"), put(f"{UP}input_scale", 0.0))
    directory = changed(exports[f"llama {NVFP4} kv"], tmp_path / "checkpoint", change)
    result = invoke(capsys, "inspect", directory)
    assert result.status == 2 and "NVFP4" in result.out
    lines = result.err.splitlines()
    assert len(lines) == 4 and all(line.startswith("dflash-trt: ") for line in lines)
    assert f"{ATTENTION}k_proj.k_scale is missing" in lines[0] and "layers.0.self_attn" in lines[0]
    assert f"{ATTENTION}v_proj.v_scale is missing" in lines[1]
    assert lines[3] == f"dflash-trt: {directory}: is not what it says it is, in the 3 ways above"
    assert json.loads(invoke(capsys, "inspect", directory, "--format", "json").out)["problems"] == [
        line.removeprefix("dflash-trt: ") for line in lines[:3]
    ]


def test_tells_what_it_cannot_build(exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = exports[f"qwen3_moe {NVFP4} kv"]
    result = invoke(capsys, "inspect", source, "--format", "json")
    assert result.status == 0, result.err
    description = json.loads(result.out)
    assert description["kind"] == "checkpoint" and description["model_type"] == "qwen3_moe"
    assert 'architectures is ["Qwen3MoeForCausalLM"]: not supported as a target' in description["unsupported"]
    assert description["quantization"] == {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
    assert description["excluded"]["model.layers.1.mlp.gate"] == ["model.layers.1.mlp.gate.weight"]
    table = invoke(capsys, "inspect", source)
    assert table.status == 0 and "Qwen3MoeForCausalLM" in table.out and "4.53" in table.out
    expert = "model.layers.1.mlp.experts.3.down_proj.input_scale"
    for change, what in ((drop(expert), "is missing"), (put(expert, 0.0), "is 0")):
        shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
        result = invoke(capsys, "inspect", changed(source, tmp_path / "checkpoint", change))
        assert result.status == 2 and f"{expert} {what}" in result.err


def gpt_oss() -> Tensors:
    """Two layers of gpt-oss's experts, four of [64, 32] and [32, 64], and a bias."""
    experts = {
        f"model.layers.{layer}.mlp.experts.{name}": tensor
        for layer in range(2)
        for name, tensor in (
            ("gate_up_proj_blocks", torch.zeros(4, 64, 1, 16, dtype=torch.uint8)),
            ("gate_up_proj_scales", torch.full((4, 64, 1), 120, dtype=torch.uint8)),
            ("gate_up_proj_bias", torch.zeros(4, 64, dtype=torch.bfloat16)),
            ("down_proj_blocks", torch.zeros(4, 32, 2, 16, dtype=torch.uint8)),
            ("down_proj_scales", torch.full((4, 32, 2), 120, dtype=torch.uint8)),
        )
    }
    return experts | {"lm_head.weight": torch.zeros(64, 32, dtype=torch.bfloat16)}


def written(directory: Path, tensors: Tensors, **quantization: object) -> Path:
    directory.mkdir(exist_ok=True)
    config = {"architectures": ["OtherForCausalLM"], "model_type": "other", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_gpt_oss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = "model.layers.1.mlp.experts.down_proj_blocks"
    scales = blocks.replace("blocks", "scales")
    directory = written(tmp_path / "gpt", gpt_oss(), quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    result = invoke(capsys, "inspect", directory, "--format", "json")
    assert result.status == 0, result.err
    description = json.loads(result.out)
    assert description["quantization"]["quant_method"] == "mxfp4"
    assert 'quant_method is "mxfp4": not supported' in description["quantization"]["unchecked"]
    assert description["formats"]["MXFP4"] == {
        "modules": 4,
        "parameters": 2 * 4 * (64 * 32 + 32 * 64),
        "bytes": 2 * 4 * (64 + 32 * 2) * 17,
        "bits_per_parameter": 4.25,
    }
    for change, what in (
        (drop(scales), "is missing; blocks of [4, 32, 2, 16] need uint8 [4, 32, 2]"),
        (put(scales, torch.full((4, 32, 1), 120, dtype=torch.uint8)), "has shape [4, 32, 1]; blocks of [4, 32, 2, 16]"),
        (put(scales, torch.full((4, 32, 2), 255, dtype=torch.uint8)), "has 256 of 256 not finite"),
    ):
        tensors = gpt_oss()
        change(tensors, directory)
        written(directory, tensors, quant_method="mxfp4")
        result = invoke(capsys, "inspect", directory)
        assert result.status == 2 and f"{directory / 'model.safetensors'}: {scales} {what}" in result.err


@pytest.mark.parametrize(
    ("quantization", "tensors"),
    [
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            {"a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)},
        ),
        (
            {"quant_method": "awq", "bits": 4},
            {"a.qweight": torch.ones(8, 8, dtype=torch.int32), "a.scales": torch.ones(1)},
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            {"a.weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(())},
        ),
    ],
    ids=lambda value: value.get("quant_algo") or value.get("quant_method") or "",
)
def test_says_that_it_cannot_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: dict[str, Any], tensors: Tensors
) -> None:
    directory = written(tmp_path / "other", tensors, **quantization)
    for extra in ("text", "json"):
        result = invoke(capsys, "inspect", directory, "--format", extra)
        assert result.status == 0 and "not supported" in result.out, result.err
    stated = json.loads(result.out)["quantization"]
    assert stated.items() >= {name: value for name, value in quantization.items() if name.startswith("quant")}.items()
    if "a.weight_scale" in tensors:
        written(directory, tensors | {"a.weight_scale": torch.tensor(float("nan"))}, **quantization)
        assert "a.weight_scale is nan; a scale must be finite" in invoke(capsys, "inspect", directory).err


def test_damaged_declarations_are_refused(exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damage(tensors: Tensors, directory: Path) -> None:
        (directory / "hf_quant_config.json").write_text("{")

    directory = changed(exports[f"llama {NVFP4}"], tmp_path / "checkpoint", damage)
    result = invoke(capsys, "inspect", directory)
    assert result.status == 2 and "hf_quant_config.json: is not JSON" in result.err


def test_a_directory_of_two_checkpoints(exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    description = json.loads(invoke(capsys, "inspect", TINY, "--format", "json").out)
    assert description["kind"] == "pair" and description["problems"] == []
    assert [description[part]["kind"] for part in ("target", "drafter")] == ["target", "DFlash drafter"]
    table = invoke(capsys, "inspect", TINY).out
    assert f"{TINY}/target: target" in table.replace("\n", "") and "block_size" in table
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    changed(exports[f"llama {NVFP4}"], tmp_path / "target", put(f"{UP}input_scale", 0.0))
    result = invoke(capsys, "inspect", tmp_path)
    assert result.status == 2 and f"target/model.safetensors: {UP}input_scale is 0" in result.err


def test_a_bar_appears_after_two_seconds(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    now = iter(range(1000))

    @contextmanager
    def recorded(what: str, total: int) -> Iterator[Callable[[int], None]]:
        shown.append(total)
        yield shown.append

    monkeypatch.setattr(bars, "count_progress", recorded)
    monkeypatch.setattr(command, "monotonic", lambda: next(now))
    with command._late_progress("reading") as progress:
        for done in range(5):
            progress(done, 5)
    assert shown == [5, 2, 1, 1]
    with command._late_progress("reading") as progress:
        describe(exports[f"llama {W4A16}"], lambda done, total: None)
    assert shown == [5, 2, 1, 1]


def test_links_out_of_the_directory_are_followed_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a Hugging Face cache has them; a link inside the directory is not worth a word."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for index, file in enumerate(sorted((TINY / "target").iterdir())):
        shutil.copy(file, tmp_path / f"blobs/{index}")
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{index}")
    (tmp_path / "snapshot/inside").symlink_to("config.json")
    shutil.copy(TINY / "target/config.json", tmp_path / "snapshot/own.json")
    names = sorted(file.name for file in (TINY / "target").iterdir())
    described = json.loads(invoke(capsys, "inspect", tmp_path / "snapshot", "--format", "json").out)
    plain = json.loads(invoke(capsys, "inspect", TINY / "target", "--format", "json").out)
    links = described.pop("links")
    assert (
        list(links) == [str(tmp_path / "blobs")] and sorted(set(links[str(tmp_path / "blobs")]) - {"inside"}) == names
    )
    assert described == plain
    text = "".join(invoke(capsys, "inspect", tmp_path / "snapshot").out.split())
    assert "links" in text and "files" in text
