"""What of a tokenizer is copied, and that transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

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


@pytest.mark.parametrize(
    "template", ["{{ x }}", [{"name": "tools", "template": ""}, {"name": "default", "template": "{{ x }}"}]]
)
def test_takes_the_template_out_of_an_old_config(saved: Path, tmp_path: Path, template: Any) -> None:
    save_tokenizer(copy_with(saved, tmp_path / "old", template), tmp_path / "new")
    assert (tmp_path / "new" / "chat_template.jinja").read_text() == "{{ x }}"


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
    source = copy_with(saved, tmp_path / "old", [{"name": "tools", "template": ""}])
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template names 1 templates"):
        save_tokenizer(source, tmp_path / "new")
