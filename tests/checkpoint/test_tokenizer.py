"""What of a tokenizer is copied, and that transformers loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer, GenerationConfig

from dflash_trt.checkpoint.encoding import template_of
from dflash_trt.checkpoint.tokenizer import save_tokenizer
from dflash_trt.errors import UserError

PROMPTS = json.loads((Path(__file__).parent / "smollm2_prompts.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """SmolLM2's tokenizer, saved from its GGUF file."""
    directory = tmp_path_factory.mktemp("tokenizer") / "saved"
    save_tokenizer(smollm2_path, directory)
    return directory


def read(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in directory.iterdir()}


def test_writes_all_that_serving_needs(saved: Path) -> None:
    assert set(read(saved)) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    generation = GenerationConfig.from_pretrained(saved)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 0, 4])


@pytest.mark.parametrize("row", PROMPTS, ids=[row["question"] for row in PROMPTS])
def test_reproduces_prompts_of_the_real_model(saved: Path, row: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    messages = [{"role": "user", "content": row["question"]}]
    applied = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert applied == row["prompt_ids"]
    text = tokenizer.decode(row["prompt_ids"])
    assert f"<|im_start|>user\n{row['question']}<|im_end|>" in text
    assert tokenizer(text)["input_ids"] == row["prompt_ids"]


def test_special_tokens(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"


def test_copies_a_hugging_face_directory(saved: Path, tmp_path: Path) -> None:
    save_tokenizer(saved, tmp_path / "copy")
    assert read(tmp_path / "copy") == read(saved)


def copy_with(saved: Path, directory: Path, template: Any) -> Path:
    """A directory as transformers 4 wrote it: the template in `tokenizer_config.json`, no generation config."""
    directory.mkdir()
    (directory / "tokenizer.json").write_text("{}")
    config = json.loads((saved / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_takes_the_template_out_of_an_old_config(saved: Path, tmp_path: Path) -> None:
    save_tokenizer(copy_with(saved, tmp_path / "old", "{{ x }}"), tmp_path / "new")
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "{{ x }}"


NAMED = {"default": "plain", "tool_use": "tools é", "rag-2.1": "documents"}


def with_named_templates(saved: Path, directory: Path, kind: str) -> Path:
    """A checkpoint of several templates, in each place where there may be some."""
    if kind == "list":
        copy_with(saved, directory, [{"name": name, "template": NAMED[name]} for name in sorted(NAMED, reverse=True)])
        shutil.copy(saved / "tokenizer.json", directory)
        return directory
    if kind == "files":
        shutil.copytree(saved, directory)
        (directory / "chat_template.jinja").write_text(NAMED["default"])
        (directory / "additional_chat_templates").mkdir()
        for name in NAMED.keys() - {"default"}:
            (directory / f"additional_chat_templates/{name}.jinja").write_text(NAMED[name], encoding="utf-8")
        return directory
    keys = {f"tokenizer.chat_template.{name}".removesuffix(".default"): text for name, text in NAMED.items()}
    return gguf_of(directory.with_suffix(".gguf"), **keys)


def gguf_of(path: Path, **templates: str) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    for key, template in templates.items():
        writer.add_string(key, template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["list", "files", "gguf"])
def test_named_templates_are_those_that_transformers_reads(saved: Path, tmp_path: Path, kind: str) -> None:
    """And they are copied on as they are."""
    source = with_named_templates(saved, tmp_path / "source", kind)
    save_tokenizer(source, tmp_path / "new")
    save_tokenizer(tmp_path / "new", tmp_path / "again")
    for directory in ("new", "again"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / directory, local_files_only=True)
        assert tokenizer.chat_template == NAMED
        assert (template_of(tokenizer, tools=False), template_of(tokenizer, tools=True)) == ("plain", "tools é")
    if kind != "gguf":
        assert AutoTokenizer.from_pretrained(source, local_files_only=True).chat_template == NAMED


def test_files_of_templates_come_before_the_config(saved: Path, tmp_path: Path) -> None:
    source = with_named_templates(saved, tmp_path / "source", "list")
    (source / "chat_template.jinja").write_text("new")
    save_tokenizer(source, tmp_path / "new")
    for directory in (source, tmp_path / "new"):
        assert AutoTokenizer.from_pretrained(directory, local_files_only=True).chat_template == "new"


@pytest.mark.parametrize(
    ("templates", "refusal"),
    [
        ([{"name": "tools", "template": ""}], "names 1 templates, none of them default"),
        ([{"name": "../x", "template": ""}], r"a chat template is called '\.\./x'"),
        ([{"name": "default"}], "chat_template must be a text, or list"),
        (["default"], "chat_template must be a text, or list"),
        (5, "chat_template"),
    ],
)
def test_refuses_templates(saved: Path, tmp_path: Path, templates: Any, refusal: str) -> None:
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: .*{refusal}"):
        save_tokenizer(copy_with(saved, tmp_path / "old", templates), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_refuses_templates_without_a_default(saved: Path, tmp_path: Path) -> None:
    source = with_named_templates(saved, tmp_path / "source", "files")
    (source / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"chat_template\.jinja: no such file, beside additional_chat_templates"):
        save_tokenizer(source, tmp_path / "new")
    file = gguf_of(tmp_path / "x.gguf", **{"tokenizer.chat_template.tool_use": "x"})
    with pytest.raises(UserError, match=r"tokenizer\.chat_template"):
        save_tokenizer(file, tmp_path / "new")


def test_no_template(saved: Path, tmp_path: Path) -> None:
    save_tokenizer(copy_with(saved, tmp_path / "old", None), tmp_path / "new")
    assert set(read(tmp_path / "new")) == {"tokenizer.json", "tokenizer_config.json"}


def test_end_tokens_of_the_config(saved: Path, tmp_path: Path) -> None:
    source = copy_with(saved, tmp_path / "old", None)
    (source / "config.json").write_text('{"bos_token_id": null, "eos_token_id": [5, 6]}')
    save_tokenizer(source, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == {"eos_token_id": [5, 6]}


def test_refuses(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file; write it with transformers\.AutoTokenizer"):
        save_tokenizer(tmp_path, tmp_path / "new")
