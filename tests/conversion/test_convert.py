"""Whole conversions: written whole or not at all, taken up again, the same however the source is cut into files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.weights import SafetensorsWeights
from dflash_trt.conversion import convert as module
from dflash_trt.conversion.convert import CalibrationData, Conversion, plan_conversion, unfinished_dir
from dflash_trt.conversion.plan import Formats
from dflash_trt.errors import UserError
from tests.checkpoint import tiny_gguf
from tests.checkpoint.test_gguf_tokenizer import BYTE_LEVEL
from tests.tiny_models import random_target, save_tokenizer

MakePair = Callable[[str, torch.dtype], Path]
WEIGHTS_ONLY = Formats("w4a16_nvfp4")


def plan(source: Path, output: Path, formats: Formats = WEIGHTS_ONLY, **options: Any) -> Conversion:
    """Target and drafter to the same formats."""
    text = options.pop("text", None)
    data = None if text is None else CalibrationData(text, size=8, max_length=64)
    target, drafter = open_target(source / "target"), open_drafter(source / "drafter")
    return plan_conversion(target, formats, drafter, formats, data, output, **options)


def sharded(source: Path, directory: Path, count: int) -> Path:
    """The same checkpoints, the target's tensors dealt out over `count` files in turn: groups are torn apart."""
    for name in ("target", "drafter"):
        (directory / name).mkdir(parents=True)
        for file in (source / name).iterdir():
            (directory / name / file.name).write_bytes(file.read_bytes())
    (directory / "target/model.safetensors").unlink()
    tensors = load_file(source / "target/model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for index in range(count):
        file = f"model-{index + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names[index::count]}, directory / "target" / file)
        weight_map |= dict.fromkeys(names[index::count], file)
    index_file = directory / "target/model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def contents(directory: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a checkpoint."""
    weights = SafetensorsWeights(directory)
    read = {name: weights.read(name) for name in weights.names()}
    return {
        name: (tensor.dtype, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, tensor in read.items()
    }


@contextmanager
def broken_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> Iterator[None]:
    """Conversions fail once that many files are written."""
    convert_shard, written = module.convert_shard, [0]

    def fail(*arguments: Any) -> None:
        if written[0] == shards:
            raise KeyboardInterrupt
        convert_shard(*arguments)
        written[0] += 1

    with monkeypatch.context() as patch:
        patch.setattr(module, "convert_shard", fail)
        yield


@pytest.mark.parametrize("formats", [WEIGHTS_ONLY, Formats("fp8", "fp8"), Formats("nvfp4")])
def test_the_source_may_be_cut_into_files_anyhow(tmp_path: Path, pair: MakePair, text: Path, formats: Formats) -> None:
    source = pair("llama", torch.bfloat16)
    options = {} if formats is WEIGHTS_ONLY else {"text": text}
    plan(source, tmp_path / "one", formats, **options).run()
    plan(sharded(source, tmp_path / "source", 5), tmp_path / "five", formats, **options).run()
    assert contents(tmp_path / "one/target") == contents(tmp_path / "five/target")
    index = json.loads((tmp_path / "five/target/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 5
    assert index["metadata"]["total_size"] == sum(len(data) for _, data in contents(tmp_path / "five/target").values())


def test_bf16_rounds_every_tensor_and_quantizes_none(tmp_path: Path, pair: MakePair) -> None:
    source = pair("llama", torch.float32)
    plan(source, tmp_path / "out", Formats("bf16")).run()
    for name in ("target", "drafter"):
        tensors = load_file(tmp_path / "out" / name / "model.safetensors")
        expected = load_file(source / name / "model.safetensors")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key].bfloat16()) for key in tensors)


def test_a_gguf_target_becomes_a_hugging_face_directory(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "model.gguf", changes=BYTE_LEVEL)
    target = open_target(tmp_path / "model.gguf")
    plan_conversion(target, WEIGHTS_ONLY, None, Formats("bf16"), None, tmp_path / "out").run()
    converted = open_target(tmp_path / "out/target")
    assert converted.config.quantization is not None and converted.config.quantization.quant_algo == "W4A16_NVFP4"
    assert not (tmp_path / "out/drafter").exists()


def test_what_broke_off_is_taken_up_where_it_was(
    tmp_path: Path, pair: MakePair, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 5)
    formats, output = Formats("fp8", "fp8"), tmp_path / "out"
    with broken_after(monkeypatch, shards=3), pytest.raises(KeyboardInterrupt):
        plan(source, output, formats, text=text).run()
    assert not output.exists()
    unfinished = unfinished_dir(output)
    kept = sorted((unfinished / "target").glob("*.safetensors"))
    assert len(kept) == 3
    times = [file.stat().st_mtime_ns for file in kept]
    kept[1].write_bytes(kept[1].read_bytes()[:-1] + b"\0")  # damaged since: another checksum

    def calibrate(*arguments: Any, **options: Any) -> None:
        raise AssertionError("calibrated again")

    monkeypatch.setattr(module, "calibrate_target", calibrate)
    monkeypatch.setattr(module, "calibrate_drafter", calibrate)
    plan(source, output, formats, text=text, resume=True).run()
    finished = [output / "target" / file.name for file in kept]
    assert [file.stat().st_mtime_ns == time for file, time in zip(finished, times, strict=True)] == [True, False, True]
    assert not unfinished.exists() and not (output / "unfinished.json").exists()
    monkeypatch.undo()
    plan(source, tmp_path / "at once", formats, text=text).run()
    for name in ("target", "drafter"):
        assert contents(output / name) == contents(tmp_path / "at once" / name)


def test_what_broke_off_is_not_overwritten_and_not_mixed(
    tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = pair("llama", torch.bfloat16), tmp_path / "out"
    with broken_after(monkeypatch, shards=1), pytest.raises(KeyboardInterrupt):
        plan(source, output).run()
    with pytest.raises(UserError, match=r"out\.unfinished: holds a conversion that broke off; go on with --resume"):
        plan(source, output)
    with pytest.raises(UserError, match=r'target qformat "w4a16_nvfp4", now it is "bf16"; give the same again'):
        plan(source, output, Formats("bf16"), resume=True).run()
    assert unfinished_dir(output).exists()


def test_a_changed_source_is_named(tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 3), tmp_path / "out"
    with broken_after(monkeypatch, shards=1), pytest.raises(KeyboardInterrupt):
        plan(source, output).run()
    os.utime(source / "target/model-00002-of-00003.safetensors", (0, 0))
    with pytest.raises(UserError, match=r"was begun with target_dir/model-00002-of-00003\.safetensors .* 1970-01-01"):
        plan(source, output, resume=True).run()


def test_a_second_conversion_into_the_same_place_is_refused(
    tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = pair("llama", torch.bfloat16), tmp_path / "out"
    first, convert_shard = plan(source, output), module.convert_shard

    def meanwhile(*arguments: Any) -> None:
        with pytest.raises(UserError, match=r"out\.unfinished: another process is converting into it"):
            plan(source, output, resume=True).run()
        convert_shard(*arguments)

    monkeypatch.setattr(module, "convert_shard", meanwhile)
    first.run()
    assert sorted(path.name for path in output.iterdir()) == ["drafter", "target"]


def test_what_cannot_take_its_name_can_be_taken_up(
    tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = pair("llama", torch.bfloat16), tmp_path / "out"
    conversion = plan(source, output)
    output.mkdir()
    (output / "notes.txt").write_text("came in between")
    with pytest.raises(UserError, match="out: cannot be written"):
        conversion.run()
    (output / "notes.txt").unlink()

    def again(*arguments: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(module, "convert_shard", again)


def test_what_was_killed_in_its_first_file_is_not_mixed(
    tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is finished then, but `hf_quant_config.json` stands there."""
    source, output = pair("llama", torch.bfloat16), tmp_path / "out"
    unfinished = unfinished_dir(output)

    def killed(*arguments: Any) -> None:
        shutil.copytree(unfinished, tmp_path / "left")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "convert_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        plan(source, output).run()
    monkeypatch.undo()
    (tmp_path / "left").rename(unfinished)
    with pytest.raises(UserError, match=r'target qformat "w4a16_nvfp4", now it is "bf16"; give the same again'):
        plan(source, output, Formats("bf16"), resume=True)
    plan(source, output, resume=True).run()
    assert sorted(path.name for path in output.iterdir()) == ["drafter", "target"]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_not_quantized_must_be_finite_too(tmp_path: Path, pair: MakePair, value: float) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 1)
    file = source / "target/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][7, 7] = value
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"of-00001\.safetensors: model\.embed_tokens\.weight holds NaN or infinity"):
        plan(source, tmp_path / "out").run()


def test_what_bf16_cannot_hold_is_refused(tmp_path: Path, pair: MakePair) -> None:
    source = sharded(pair("llama", torch.float32), tmp_path / "source", 1)
    file = source / "target/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = 3.4e38
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model\.norm\.weight holds 3\.4e\+38, beyond bfloat16"):
        plan(source, tmp_path / "out", Formats("bf16")).run()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, pair: MakePair, text: Path) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 1)
    save_tokenizer(source / "target", 256)
    text = tmp_path / "text.txt"
    text.write_text("naïve café")
    with pytest.raises(UserError, match=r"text\.txt: holds the token \d+, outside a vocabulary of 97"):
        plan(source, tmp_path / "out", Formats("fp8"), text=text)


def test_what_is_no_conversion_is_not_taken_up(tmp_path: Path, pair: MakePair) -> None:
    unfinished = unfinished_dir(tmp_path / "out")
    unfinished.mkdir()
    (unfinished / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out\.unfinished: holds files, but no unfinished\.json"):
        plan(pair("llama", torch.bfloat16), tmp_path / "out", resume=True)
    assert (unfinished / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("", r"unfinished\.json: is not JSON .*; put it right, or remove .*out\.unfinished$"),
        ('{"settings": {}, "calibrations": {}, "shards": 1}', "shards is 1: must be an object; put it right"),
        (
            '{"settings": {}, "calibrations": {"target": {"inputs": {"a": "b"}}}, "shards": {}}',
            r"is damaged, calibrations\.target\.inputs\.a: .*; remove .*out\.unfinished$",
        ),
    ],
)
def test_a_damaged_journal_is_refused(tmp_path: Path, pair: MakePair, damage: str, message: str) -> None:
    unfinished = unfinished_dir(tmp_path / "out")
    unfinished.mkdir()
    (unfinished / "unfinished.json").write_text(damage)
    with pytest.raises(UserError, match=message):
        plan(pair("llama", torch.bfloat16), tmp_path / "out", resume=True)


def test_an_output_that_cannot_be_replaced_is_refused_at_once(
    tmp_path: Path, pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pair("llama", torch.bfloat16)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="loop: "):
        plan(source, tmp_path / "loop")
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(UserError, match="volume: is a mount point"):
        plan(source, tmp_path / "volume")


def test_text_that_the_target_cannot_read_is_refused_at_once(tmp_path: Path, text: Path) -> None:
    """Before, a token outside the vocabulary was an IndexError of torch's."""
    random_target(tmp_path / "target", vocab_size=40, max_position_embeddings=16)
    target = open_target(tmp_path / "target")

    def refusal(max_length: int) -> str:
        data = CalibrationData(text, size=8, max_length=max_length)
        with pytest.raises(UserError) as refused:
            plan_conversion(target, Formats("fp8"), None, Formats("bf16"), data, tmp_path / "out")
        return str(refused.value)

    assert f"a sample of 43 tokens, above max_position_embeddings 16 of {target.path}; cut" in refusal(64)
    save_tokenizer(tmp_path / "target", 97)
    assert "outside a vocabulary of 40; the tokenizer of" in refusal(16)


def test_matrices_of_several_types_are_refused_at_once(tmp_path: Path, pair: MakePair, text: Path) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 1)
    file = source / "target/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].float()
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"its matrices are bfloat16, float32, .* convert it with --qformat bf16 first"):
        plan(source, tmp_path / "out", Formats("fp8"), text=text)
    plan(source, tmp_path / "first", Formats("bf16")).run()
    plan(tmp_path / "first", tmp_path / "out", Formats("fp8"), text=text).run()


def test_a_failure_before_anything_is_finished_leaves_nothing(tmp_path: Path, pair: MakePair) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 1)
    file = source / "target/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"of-00001\.safetensors: model\.layers\.2\.mlp\.up_proj\.weight: 1 of its"):
        plan(source, tmp_path / "new" / "out").run()
    assert sorted(tmp_path.iterdir()) == before


def test_an_output_that_is_taken_is_left_alone(tmp_path: Path, pair: MakePair) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="out: exists and is not empty"):
        plan(pair("llama", torch.bfloat16), tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("formats", [Formats("fp8"), Formats("nvfp4"), Formats("bf16", "fp8")])
def test_scales_that_only_running_shows_need_text(tmp_path: Path, pair: MakePair, formats: Formats) -> None:
    with pytest.raises(UserError, match="calib_dataset: is needed"):
        plan(pair("llama", torch.bfloat16), tmp_path / "out", formats)


def test_text_that_nothing_needs_is_refused(tmp_path: Path, pair: MakePair, text: Path) -> None:
    with pytest.raises(UserError, match=r"calib_dataset .*calibration\.jsonl: is not needed"):
        plan(pair("llama", torch.bfloat16), tmp_path / "out", text=text)


def test_layers_that_share_weights_have_scales_each(tmp_path: Path, pair: MakePair, text: Path) -> None:
    source = sharded(pair("llama", torch.bfloat16), tmp_path / "source", 1)
    file = source / "target/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        k = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        tensors[f"model.layers.{layer}.self_attn.v_proj.weight"] = k.clone()
    save_file(tensors, file)
    plan(source, tmp_path / "out", Formats("nvfp4", "fp8"), text=text).run()
    found = SafetensorsWeights(tmp_path / "out/target")
    for scale in (
        "k_proj.weight_scale",
        "v_proj.weight_scale",
        "k_proj.k_scale",
        "v_proj.v_scale",
        "v_proj.input_scale",
    ):
        assert f"model.layers.3.self_attn.{scale}" in found


CONVERT_AND_MEASURE = """
import sys
from pathlib import Path
import torch
from dflash_trt.checkpoint.open_checkpoint import open_target
from dflash_trt.conversion.convert import plan_conversion
from dflash_trt.conversion.plan import Formats
def anonymous():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
formats = Formats("w4a16_nvfp4")
conversion = plan_conversion(open_target(sys.argv[1]), formats, None, formats, None, Path(sys.argv[2]))
before, peaks = anonymous(), {"RssAnon": 0, "RssFile": 0}
class Bar:
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def __call__(self, amount):
        now = anonymous()
        for name in peaks: peaks[name] = max(peaks[name], now[name] - before[name])
conversion.run(lambda what, total, unit: Bar())
print(peaks["RssAnon"], peaks["RssFile"])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_checkpoint_is_never_in_memory(tmp_path: Path) -> None:
    """A third of a gigabyte in 8 files, a fifth of it the embedding: copies take less than a quarter of it, mapped pages less than a third."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=32768,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "target", max_shard_size="35MB")
    save_tokenizer(tmp_path / "target", 256)
    assert len(list((tmp_path / "target").glob("*.safetensors"))) >= 8
    size = sum(file.stat().st_size for file in (tmp_path / "target").glob("*.safetensors"))
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    arguments = [sys.executable, "-c", CONVERT_AND_MEASURE, str(tmp_path / "target"), str(tmp_path / "out")]
    printed = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout.split()
    copied, mapped = map(int, printed[-2:])
    assert copied < size / 4 and mapped < size / 3
