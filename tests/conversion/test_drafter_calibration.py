"""Calibration of drafters against the authors' model, fed with transformers' hidden states."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import dflash.model
import pytest
import torch
from dflash.model import extract_context_feature
from safetensors.torch import load_file, save_file
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, open_drafter, open_target
from dflash_trt.conversion.drafter_calibration import calibrate_drafter
from dflash_trt.errors import UserError
from dflash_trt.models.pair import drafter_manifest
from tests.checkpoint import tiny_gguf
from tests.models.test_dflash import SLIDING, as_speculators
from tests.tiny_models import random_drafter, random_target

SAMPLES = [[3, 50, 7, 9, 60, 60, 4, 8, 11], [5], [17, 18], list(range(30, 75))]
BLOCK = 4


def linears(drafter: DrafterCheckpoint) -> list[str]:
    names = [name for name, shape in drafter_manifest(drafter).floats.items() if len(shape) == 2]
    return [name.removesuffix(".weight") for name in names]


class Watched:
    """Largest magnitudes in the authors' model, of the inputs of its linear layers and of what its attention sees."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.inputs: dict[str, float] = defaultdict(float)
        self.keys: dict[str, float] = defaultdict(float)
        self.values: dict[str, float] = defaultdict(float)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, args, name=name: self.see(self.inputs, name, args[0]))
        sdpa = dflash.model.ALL_ATTENTION_FUNCTIONS["sdpa"]

        def watching(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            self.see_cached(module.layer_idx, k, v)
            return sdpa(module, q, k, v, *args, **kwargs)

        monkeypatch.setattr(dflash.model, "ALL_ATTENTION_FUNCTIONS", {"sdpa": watching})

    def see(self, seen: dict[str, float], name: str, x: torch.Tensor) -> None:
        seen[name] = max(seen[name], float(x.abs().max()))

    def see_cached(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.see(self.keys, f"layers.{layer}.self_attn", keys)
        self.see(self.values, f"layers.{layer}.self_attn", values)

    def read(self, features: torch.Tensor) -> None:
        """Context of a whole sample, of which the last token's no block sees."""
        context = self.model.hidden_norm(self.model.fc(features))
        cos, sin = self.model.rotary_emb(context, torch.arange(context.shape[1])[None])
        for layer in self.model.layers:
            attention = layer.self_attn
            heads = (*context.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(heads)).transpose(1, 2)
            _, keys = apply_rotary_pos_emb(keys, keys, cos, sin)
            self.see_cached(attention.layer_idx, keys, attention.v_proj(context))


@torch.no_grad()
def watch_the_authors(target: Any, drafter: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Let the authors' model draft after the last token of every sample and every BLOCK tokens before."""
    watched = Watched(drafter, monkeypatch)
    for ids in SAMPLES:
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = extract_context_feature(states, drafter.target_layer_ids)
        watched.read(features)
        for anchor in range(len(ids) - 1, 0, -BLOCK):
            block = torch.tensor([[ids[anchor]] + [2] * (BLOCK - 1)])
            drafter(
                target_hidden=features[:, :anchor],
                noise_embedding=target.model.embed_tokens(block) * scale,
                position_ids=torch.arange(anchor + BLOCK)[None],
            )
    return watched


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("overrides", "scale"),
    [
        ({}, 1.0),
        ({**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, 1.0),
        ({"attention_bias": True, "input_embedding_scale": 6.5}, 6.5),
    ],
)
def test_equals_the_authors_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    family: str,
    overrides: dict[str, Any],
    scale: float,
) -> None:
    target = random_target(tmp_path / "target", family)
    theirs = random_drafter(tmp_path / "drafter", target, block_size=BLOCK, **overrides)
    drafter = open_drafter(tmp_path / "drafter")
    seen: list[int] = []
    capfd.readouterr()
    ours = calibrate_drafter(
        open_target(tmp_path / "target"), drafter, SAMPLES, linears(drafter), kv_cache=True, progress=seen.append
    )
    assert capfd.readouterr() == ("", "")
    expected = watch_the_authors(target, theirs, scale, monkeypatch)
    assert ours.inputs == pytest.approx(expected.inputs, rel=1e-5)
    assert ours.keys == pytest.approx(expected.keys, rel=1e-5)
    assert ours.values == pytest.approx(expected.values, rel=1e-5)
    assert (len(ours.inputs), len(ours.keys), len(seen)) == (15, 2, 4)
    assert ours.method == "largest magnitudes while drafting in float32 over 4 samples of 57 tokens in all"


def test_runs_in_the_targets_type(tmp_path: Path) -> None:
    """A drafter in float32 beside a target in bfloat16: what is seen are bfloat16 numbers."""
    target = random_target(tmp_path / "target")
    random_drafter(tmp_path / "drafter", target, block_size=BLOCK)
    target.bfloat16().save_pretrained(tmp_path / "target")
    drafter = open_drafter(tmp_path / "drafter")
    found = calibrate_drafter(open_target(tmp_path / "target"), drafter, SAMPLES, linears(drafter), kv_cache=True)
    seen = torch.tensor([*found.inputs.values(), *found.keys.values(), *found.values.values()])
    assert torch.equal(seen, seen.bfloat16().float()) and "in bfloat16" in found.method


def test_a_drafters_own_head_sees_every_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is the output of the last norm, without the anchor's row."""
    target = random_target(tmp_path / "target")
    theirs = random_drafter(tmp_path / "z-lab", target, seed=5, block_size=BLOCK)
    token_ids = [3, 4, 9, 40, 41, 96]
    as_speculators(tmp_path / "z-lab", tmp_path / "own", token_ids, target.lm_head.weight[token_ids].clone())
    found = calibrate_drafter(
        open_target(tmp_path / "target"), open_drafter(tmp_path / "own"), SAMPLES, ["lm_head"], kv_cache=False
    )
    normed: list[torch.Tensor] = []
    theirs.norm.register_forward_hook(lambda _, args, output: normed.append(output.abs().amax(-1)))
    watch_the_authors(target, theirs, 1.0, monkeypatch)
    anchor, first, *others = torch.cat(normed).amax(0).tolist()
    assert max(others) > max(anchor, first), "seeds under which one row more or less would go unnoticed"
    assert found.inputs == pytest.approx({"lm_head": max(others)}, rel=1e-5)
    assert found.keys == found.values == {}


def test_gguf_target(tmp_path: Path) -> None:
    """A drafter in bfloat16 beside a target that is unpacked to float32 runs in float32."""
    tiny_gguf.write(tmp_path / "a.gguf")
    stand_in = random_target(
        tmp_path / "stand-in",
        vocab_size=tiny_gguf.VOCAB,
        hidden_size=tiny_gguf.HIDDEN,
        num_hidden_layers=tiny_gguf.LAYERS,
    )
    random_drafter(tmp_path / "drafter", stand_in, target_layer_ids=(0, 1))
    weights = load_file(tmp_path / "drafter/model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "drafter/model.safetensors")
    found = calibrate_drafter(
        open_target(tmp_path / "a.gguf"), open_drafter(tmp_path / "drafter"), SAMPLES, ["fc"], kv_cache=True
    )
    assert set(found.inputs) == {"fc"} and "in float32" in found.method


def refuse(root: Path, samples: list[list[int]], message: str, changes: dict[str, float] | None = None) -> None:
    random_drafter(root / "drafter", random_target(root / "target"), block_size=BLOCK)
    weights = load_file(root / "drafter/model.safetensors")
    for name, value in (changes or {}).items():
        weights[name] = torch.full_like(weights[name], value)
    save_file(weights, root / "drafter/model.safetensors")
    drafter = open_drafter(root / "drafter")
    with pytest.raises(UserError, match=message) as refusal:
        calibrate_drafter(open_target(root / "target"), drafter, samples, linears(drafter), kv_cache=True)
    assert str(refusal.value).startswith(str(root / "drafter"))


def test_refuses_a_target_that_is_not_finite(tmp_path: Path) -> None:
    """By its own file's name: what reaches the drafter would be called the drafter's fault."""
    model = random_target(tmp_path / "target")
    random_drafter(tmp_path / "drafter", model, block_size=BLOCK)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    model.save_pretrained(tmp_path / "target")
    pair = open_target(tmp_path / "target"), open_drafter(tmp_path / "drafter")
    with pytest.raises(UserError, match=r"target/model\.safetensors: model\.norm\.weight holds NaN or infinity"):
        calibrate_drafter(*pair, SAMPLES, ["fc"], kv_cache=False)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_norm.weight", float("nan"), "hidden_norm.weight holds NaN or infinity; the checkpoint is damaged"),
        (
            "fc.weight",
            3e38,
            "the input of layers.0.self_attn.k_proj became infinite or not a number in float32",
        ),
        ("layers.1.self_attn.v_proj.weight", 3e38, "the values of layers.1.self_attn became infinite"),
        ("layers.1.mlp.up_proj.weight", 0.0, "largest magnitude of the input of layers.1.mlp.down_proj is 0"),
        ("layers.0.self_attn.k_norm.weight", 0.0, "largest magnitude of the keys of layers.0.self_attn is 0"),
    ],
)
def test_refuses_what_no_scale_can_be_made_from(tmp_path: Path, name: str, value: float, message: str) -> None:
    refuse(tmp_path, SAMPLES, message, {name: value})


@pytest.mark.parametrize(("samples", "name"), [([], "fc"), ([[5], [6]], "layers.0.self_attn.q_proj")])
def test_refuses_when_no_token_reached_a_layer(tmp_path: Path, samples: list[list[int]], name: str) -> None:
    refuse(tmp_path, samples, f"no calibration token reached {name}")
