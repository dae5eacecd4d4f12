"""What the config of a DFlash drafter says, whichever of the two formats it is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.drafter_layers import DraftLayer, read_layers
from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.quantization_config import QUANTIZATION_KEY, QuantizationConfig, read_quantization
from dflash_trt.checkpoint.rope import RopeConfig, read_rope
from dflash_trt.checkpoint.sizes import LARGEST_SIZES, check_sizes
from dflash_trt.checkpoint.target import CONFIG_FILE, read_heads

__all__ = ["DraftLayer", "DrafterConfig"]

# Read by other runtimes in DFlash-like checkpoints; each changes what the drafter computes.
_OTHERS_KEYS = ("causal", "use_swa", "swa_window_size", "attention_sink_bias", "add_swa_attention_sink_bias")


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash drafter: a stack of Qwen3-style layers that proposes a block of tokens at once.

    Attributes:
        format: `z-lab`, the authors' checkpoints, or `speculators`, vLLM's.
        hidden_size: width of the residual stream; also the width of each tapped target state.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim: as in Qwen3.
        vocab_size: rows of the embedding, the target's.
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary embedding of queries and keys, the drafter's own.
        attention_bias: q, k, v and o have biases.
        block_size: positions of one drafting pass: the anchor and `block_size - 1` drafts.
        mask_token_id: fills the positions after the anchor.
        target_layer_ids: target layers whose output (the residual stream after that layer, 0-based) is
            concatenated into the features, in this order. A speculators file stores each plus one.
        num_target_layers: layers of the target it was trained for, where the file says so.
        layers: what each layer's attention sees.
        input_embedding_scale: factor on the embedding of the block.
        output_multiplier: factor on the logits, before the cap.
        final_logit_softcapping: c in c * tanh(logits / c); None for no cap.
        draft_vocab_size: rows of the drafter's head in the speculators format. Where that is below
            `vocab_size`, draft id i stands for target id i + d2t[i]. None in the z-lab format, which has no
            head and uses the target's.
        quantization: how its own weights and caches are quantized, whatever the target's are; None where they are not.
    """

    format: Literal["z-lab", "speculators"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layers: tuple[DraftLayer, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None
    quantization: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def has_reduced_vocabulary(self) -> bool:
        """The drafter has a head of its own over fewer tokens, with the map `d2t` to the target's."""
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> DrafterConfig:
        """Read `config.json`.

        Raises:
            UserError: the file is missing, lacks a key, or asks for something that is not supported.
        """
        top = JsonObject.from_file(Path(directory) / CONFIG_FILE)
        return cls.from_dict(dict(top.values), top.path)

    @classmethod
    def from_dict(cls, config: dict[str, Any], path: Path) -> DrafterConfig:
        """Read a parsed `config.json` of either format.

        Absent `attention_bias`, `is_causal`, scales and softcap mean off, as in the formats' own definitions.
        `block_size`, `mask_token_id` and the tapped layers are required.

        Raises:
            UserError: a key is missing or its value is not supported.
        """
        top = JsonObject(config, path)
        if "speculators_model_type" in top:
            return _read_speculators(top)
        if top.texts("architectures") != ("DFlashDraftModel",):
            raise top.error(
                "architectures",
                'not supported as a drafter; supported are "DFlashDraftModel" and speculators\' "dflash"',
            )
        return _read_z_lab(top)


def _read_z_lab(top: JsonObject) -> DrafterConfig:
    draft = top.object("dflash_config")
    for place in (top, draft):
        for key in _OTHERS_KEYS:
            if place.values.get(key):
                raise place.error(key, "not part of the authors' DFlash, not supported")

    def either(key: str) -> JsonObject:
        if key in top and key in draft and top.values[key] != draft.values[key]:
            raise draft.error(key, f"differs from the top-level {key}, {top.values[key]}; keep the right one")
        return top if key in top else draft

    def scale(key: str) -> float:
        place = either(key)
        return place.positive(key) if key in place else 1.0

    softcapping = either("final_logit_softcapping")
    # The authors' code takes 0, like null, for no cap.
    capped = "final_logit_softcapping" in softcapping and softcapping.values["final_logit_softcapping"] != 0
    body = _body(top)
    return DrafterConfig(
        format="z-lab",
        **body,
        block_size=either("block_size").size("block_size", minimum=2),
        mask_token_id=either("mask_token_id").token_id("mask_token_id", body["vocab_size"]),
        target_layer_ids=_tapped_layers(either("target_layer_ids"), "target_layer_ids", first=0),
        num_target_layers=top.size("num_target_layers") if "num_target_layers" in top else None,
        layers=read_layers(top, sliding_is_causal=True),
        input_embedding_scale=scale("input_embedding_scale"),
        output_multiplier=scale("output_multiplier"),
        final_logit_softcapping=softcapping.positive("final_logit_softcapping") if capped else None,
        quantization=read_quantization(top),
    )


def _read_speculators(top: JsonObject) -> DrafterConfig:
    if top.text("speculators_model_type") != "dflash":
        raise top.error("speculators_model_type", 'not supported; supported is "dflash"')
    if top.boolean("sample_from_anchor", absent=False):
        raise top.error("sample_from_anchor", "a drafter that also drafts at the anchor is not supported")
    if top.boolean("shift_label", absent=False):
        raise top.error("shift_label", "a drafter trained on shifted labels is not supported")
    if "projector_type" in top and top.text("projector_type") != "dflash":
        raise top.error("projector_type", 'only "dflash" is supported')
    body = top.object("transformer_layer_config")
    if QUANTIZATION_KEY in body:
        raise body.error(QUANTIZATION_KEY, f"must stand at the top of the file, as {QUANTIZATION_KEY}")
    hidden_size = body.size("hidden_size")
    if "target_hidden_size" in top and top.integer("target_hidden_size") != hidden_size:
        raise top.error("target_hidden_size", f"must be {body.key('hidden_size')}, {hidden_size}")
    block_size = top.size("block_size", minimum=2)
    _check_proposals(top, block_size)

    vocab_size = body.size("vocab_size")
    draft_vocab_size = top.size("draft_vocab_size")
    if draft_vocab_size > vocab_size:
        raise top.error("draft_vocab_size", f"must not exceed {body.key('vocab_size')}, {vocab_size}")
    stored_ids = _tapped_layers(top, "aux_hidden_state_layer_ids", first=1)
    for key in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
        if key in top and top.values[key] != body.values.get(key):
            raise top.error(key, f"differs from {body.key(key)}; keep the right one")
    return DrafterConfig(
        format="speculators",
        **_body(body),
        block_size=block_size,
        mask_token_id=top.token_id("mask_token_id", vocab_size),
        target_layer_ids=tuple(stored - 1 for stored in stored_ids),
        num_target_layers=None,
        layers=read_layers(body, sliding_is_causal=not top.boolean("sliding_window_non_causal", absent=False)),
        draft_vocab_size=draft_vocab_size,
        quantization=read_quantization(top),
    )


def _check_proposals(top: JsonObject, block_size: int) -> None:
    """Files older than `sample_from_anchor` show that layout by proposing as many tokens as the block has."""
    if "speculators_config" not in top:
        return
    methods = top.object("speculators_config").values.get("proposal_methods")
    for index, method in enumerate(methods if isinstance(methods, list) else ()):
        if not isinstance(method, dict):
            continue
        proposal = JsonObject(method, top.path, f"speculators_config.proposal_methods[{index}]")
        if "speculative_tokens" in proposal and proposal.integer("speculative_tokens") >= block_size:
            raise proposal.error("speculative_tokens", f"a block_size of {block_size} drafts {block_size - 1} tokens")


def _body(top: JsonObject) -> dict[str, Any]:
    """The fields that both formats spell as a Qwen3 config does."""
    if top.text("hidden_act") != "silu":
        raise top.error("hidden_act", 'only "silu" is supported')
    kv_heads, head_dim = read_heads(top, derive=False)
    return {
        "hidden_size": top.size("hidden_size"),
        "intermediate_size": top.size("intermediate_size"),
        "num_hidden_layers": top.size("num_hidden_layers"),
        "num_attention_heads": top.size("num_attention_heads"),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": top.size("vocab_size"),
        "rms_norm_eps": top.positive("rms_norm_eps", largest=1),
        "rope": read_rope(dict(top.values), head_dim, top.path, top.name),
        "attention_bias": top.boolean("attention_bias", absent=False),
    }


def _tapped_layers(top: JsonObject, key: str, first: int) -> tuple[int, ...]:
    ids = top.integers(key, first, LARGEST_SIZES["num_target_layers"])
    if not ids or len(set(ids)) != len(ids):
        raise top.error(key, "must name at least one layer, none of them twice")
    return ids
