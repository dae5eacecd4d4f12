"""Which tensors a checkpoint must hold, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.target import TargetConfig
from dflash_trt.checkpoint.weights import Weights
from dflash_trt.errors import UserError

Shapes = dict[str, tuple[int, ...]]

# Written by transformers before 4.32; computed from the config since.
_OBSOLETE = "rotary_emb.inv_freq"


def target_tensors(config: TargetConfig) -> Shapes:
    """Every tensor of a target and its shape before quantization; matrices are [out, in]."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_hidden_layers):
        shapes |= _layer(
            f"model.layers.{layer}",
            config,
            head_norms=config.architecture == "Qwen3ForCausalLM",
            mlp_bias=config.mlp_bias,
        )
    return shapes


def drafter_tensors(config: DrafterConfig) -> Shapes:
    """Every tensor that a drafter must hold and its shape before quantization; matrices are [out, in]."""
    hidden_size = config.hidden_size
    shapes: Shapes = {
        "fc.weight": (hidden_size, len(config.target_layer_ids) * hidden_size),
        "hidden_norm.weight": (hidden_size,),
        "norm.weight": (hidden_size,),
    }
    if config.draft_vocab_size is not None and config.has_reduced_vocabulary:
        shapes |= {
            "lm_head.weight": (config.draft_vocab_size, hidden_size),
            "d2t": (config.draft_vocab_size,),
        }
    for layer in range(config.num_hidden_layers):
        shapes |= _layer(f"layers.{layer}", config, head_norms=True, mlp_bias=False)
    return shapes


def optional_drafter_tensors(config: DrafterConfig) -> Shapes:
    """What a speculators file may hold besides: copies of the target's weights, and maps without use here."""
    if config.format == "z-lab":
        return {}
    matrix = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {
        "embed_tokens.weight": matrix,
        "verifier_norm.weight": (config.hidden_size,),
        "t2d": (config.vocab_size,),
    }
    if not config.has_reduced_vocabulary:
        shapes |= {"lm_head.weight": matrix, "d2t": (config.vocab_size,)}
    return shapes


def check_tensors(
    path: Path, weights: Weights, required: Shapes, optional: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse weights that do not fit their config.

    A tensor of 16 bits or more per element must have its shape. Companions that quantization adds beside a
    weight (`...weight_scale`) are let through, as are narrower weights of whatever shape.

    Args:
        path: the checkpoint, for messages.
        weights: what it holds.
        required: what it must hold.
        optional: what it may hold too.

    Raises:
        UserError: a tensor is missing, has another shape, or is one that the config does not account for.
    """
    known = {**optional, **required}
    modules = {name.rpartition(".")[0] for name in known if "." in name}
    for name in required:
        if name not in weights:
            raise UserError(f"{path}: lacks the tensor {name}, of shape {list(required[name])}")
    for name in weights.names():
        module, _, parameter = name.rpartition(".")
        if name in known:
            if weights.dtype(name).itemsize > 1 and weights.shape(name) != known[name]:
                raise UserError(
                    f"{weights.file_of(name)}: tensor {name} has shape {list(weights.shape(name))}; "
                    f"the config makes it {list(known[name])}"
                )
        elif not name.endswith(_OBSOLETE) and (module not in modules or parameter == "bias"):
            raise UserError(f"{weights.file_of(name)}: tensor {name} has no place in the model of the config")


def _layer(prefix: str, config: TargetConfig | DrafterConfig, head_norms: bool, mlp_bias: bool) -> Shapes:
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    attention: Shapes = {
        f"{prefix}.self_attn.q_proj": (queries, hidden_size),
        f"{prefix}.self_attn.k_proj": (keys, hidden_size),
        f"{prefix}.self_attn.v_proj": (keys, hidden_size),
        f"{prefix}.self_attn.o_proj": (hidden_size, queries),
    }
    mlp: Shapes = {
        f"{prefix}.mlp.gate_proj": (intermediate_size, hidden_size),
        f"{prefix}.mlp.up_proj": (intermediate_size, hidden_size),
        f"{prefix}.mlp.down_proj": (hidden_size, intermediate_size),
    }
    norms: Shapes = {
        f"{prefix}.input_layernorm": (hidden_size,),
        f"{prefix}.post_attention_layernorm": (hidden_size,),
    }
    if head_norms:
        norms |= {f"{prefix}.self_attn.{norm}": (config.head_dim,) for norm in ("q_norm", "k_norm")}
    shapes = {f"{module}.weight": shape for module, shape in (attention | mlp | norms).items()}
    for matrices, has_bias in ((attention, config.attention_bias), (mlp, mlp_bias)):
        if has_bias:
            shapes |= {f"{module}.bias": shape[:1] for module, shape in matrices.items()}
    return shapes
