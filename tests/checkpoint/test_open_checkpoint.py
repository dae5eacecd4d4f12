from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.open_checkpoint import open_drafter, open_target
from dflash_trt.checkpoint.tensors import drafter_tensors, optional_drafter_tensors, target_tensors
from dflash_trt.errors import UserError

PATH = Path("draft/config.json")
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2-135m" / "drafter"


def save(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def speculators_tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    read = DrafterConfig.from_dict(config, PATH)
    tensors = {name: torch.zeros(shape) for name, shape in drafter_tensors(read).items()}
    return tensors | {"d2t": torch.arange(40)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model_class", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_what_transformers_saves(
    tmp_path: Path, llama_config: dict[str, Any], model_class: Any, bias: bool, tied: bool
) -> None:
    config_class = LlamaConfig if model_class is LlamaForCausalLM else Qwen3Config
    values = llama_config | {"head_dim": 16, "attention_bias": bias, "tie_word_embeddings": tied}
    del values["architectures"], values["model_type"]
    if config_class is LlamaConfig:
        values["mlp_bias"] = bias
    model_class(config_class(**values)).save_pretrained(tmp_path)
    target = open_target(tmp_path)
    assert set(target.weights.names()) == set(target_tensors(target.config))
    assert ("lm_head.weight" in target.weights) is not tied


@pytest.mark.parametrize("bias", [False, True])
def test_what_the_authors_save(tmp_path: Path, z_lab_config: dict[str, Any], bias: bool) -> None:
    config = z_lab_config | {"attention_bias": bias}
    DFlashDraftModel(Qwen3Config(**config)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = open_drafter(tmp_path)
    assert set(drafter.weights.names()) == set(drafter_tensors(drafter.config))
    assert not drafter.own_embedding and not drafter.own_head


def test_gguf(smollm2_path: Path) -> None:
    for path in (smollm2_path, smollm2_path.parent):
        target = open_target(path)
        assert target.path == smollm2_path
        assert target.config.tie_word_embeddings


def test_example() -> None:
    assert open_drafter(EXAMPLE).config.num_hidden_layers == 3


def test_speculators_with_a_reduced_vocabulary(tmp_path: Path, speculators_config: dict[str, Any]) -> None:
    tensors = speculators_tensors(speculators_config)
    drafter = open_drafter(save(tmp_path, speculators_config, tensors))
    assert drafter.own_head and not drafter.own_embedding
    optional = optional_drafter_tensors(drafter.config)
    assert set(optional) == {"embed_tokens.weight", "verifier_norm.weight", "t2d"}
    tensors |= {name: torch.zeros(shape) for name, shape in optional.items()}
    assert open_drafter(save(tmp_path, speculators_config, tensors)).own_embedding


@pytest.mark.parametrize("stored", [False, True])
def test_speculators_with_the_full_vocabulary(
    tmp_path: Path, speculators_config: dict[str, Any], stored: bool
) -> None:
    config = speculators_config | {"draft_vocab_size": 96}
    tensors = speculators_tensors(config)
    del tensors["d2t"]
    if stored:
        tensors["lm_head.weight"] = torch.zeros(96, 32)
    assert open_drafter(save(tmp_path, config, tensors)).own_head is stored


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.arange(40) * 2, "d2t maps a draft id to 96, outside a vocabulary of 96"),
        (-torch.arange(40), "d2t maps two draft ids to one token"),
        (torch.arange(39), None),
    ],
)
def test_refuses_a_bad_map(
    tmp_path: Path, speculators_config: dict[str, Any], d2t: torch.Tensor, message: str | None
) -> None:
    tensors = speculators_tensors(speculators_config) | {"d2t": d2t}
    if message is None:
        message = "tensor d2t has shape [39]; the config makes it [40]"
    with pytest.raises(UserError) as refusal:
        open_drafter(save(tmp_path, speculators_config, tensors))
    assert str(refusal.value).startswith(f"{tmp_path / 'model.safetensors'}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("fc.weight", None, "lacks the tensor fc.weight, of shape [576, 2880]"),
        (None, ("layers.3.mlp.up_proj.weight", (4, 4)), "layers.3.mlp.up_proj.weight has no place"),
        (None, ("layers.0.self_attn.attention_sink_bias", (9,)), "attention_sink_bias has no place"),
        (None, ("layers.0.self_attn.q_proj.bias", (576,)), "layers.0.self_attn.q_proj.bias has no place"),
        (None, ("lm_head.weight", (4, 4)), "lm_head.weight has no place"),
        (None, ("norm.weight", (4,)), "norm.weight has shape [4]; the config makes it [576]"),
    ],
)
def test_refuses_weights_that_do_not_fit(
    tmp_path: Path, removed: str | None, added: tuple[str, tuple[int, ...]] | None, message: str
) -> None:
    tensors = load_file(EXAMPLE / "model.safetensors")
    if removed:
        del tensors[removed]
    if added:
        tensors[added[0]] = torch.zeros(added[1])
    directory = save(tmp_path, json.loads((EXAMPLE / "config.json").read_text()), tensors)
    with pytest.raises(UserError) as refusal:
        open_drafter(directory)
    assert str(refusal.value).startswith(str(tmp_path)) and message in str(refusal.value)


def test_quantized_weights_bring_companions(tmp_path: Path, z_lab_config: dict[str, Any]) -> None:
    read = DrafterConfig.from_dict(z_lab_config, PATH)
    tensors = {
        name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in drafter_tensors(read).items()
    }
    tensors["fc.weight"] = torch.zeros(32, 32, dtype=torch.uint8)
    tensors |= {"fc.weight_scale": torch.zeros(1), "fc.input_scale": torch.zeros(1)}
    open_drafter(save(tmp_path, z_lab_config, tensors))


def test_a_tied_head_may_be_stored_too(tmp_path: Path, llama_config: dict[str, Any]) -> None:
    values = llama_config | {"tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    assert "lm_head.weight" in open_target(save(tmp_path, values, tensors)).weights


def test_refuses_an_untied_target_without_a_head(tmp_path: Path, llama_config: dict[str, Any]) -> None:
    LlamaForCausalLM(LlamaConfig(**llama_config | {"tie_word_embeddings": True})).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(llama_config))
    with pytest.raises(UserError, match=r"lacks the tensor lm_head.weight, of shape \[96, 32\]"):
        open_target(tmp_path)


def test_refuses_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/config\.json: no such file"):
        open_target(tmp_path / "nowhere")
