"""What the config of a target model says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_trt.checkpoint.json_object import JsonObject
from dflash_trt.checkpoint.quantization_config import QUANTIZATION_KEY, QuantizationConfig, read_quantization
from dflash_trt.checkpoint.regular_file import is_file
from dflash_trt.checkpoint.rope import RopeConfig, read_rope
from dflash_trt.checkpoint.sizes import check_sizes

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

Architecture = Literal["LlamaForCausalLM", "Qwen3ForCausalLM"]

_MODEL_TYPES: dict[Architecture, str] = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class TargetConfig:
    """A decoder of the Llama or Qwen3 architecture.

    Attributes:
        architecture: the class that transformers has for it.
        vocab_size: rows of the embedding.
        hidden_size, intermediate_size: width of the residual stream and of the MLP.
        num_hidden_layers, num_attention_heads, num_key_value_heads: counts.
        head_dim: width of one head; heads * head_dim need not be `hidden_size`.
        rms_norm_eps: added to the mean square in every norm.
        max_position_embeddings: tokens of context the model was made for.
        rope: rotary embedding.
        tie_word_embeddings: the head is the embedding.
        attention_bias: q, k, v and o have biases.
        mlp_bias: gate, up and down have biases.
        bos_token_id: first token, where the model has one.
        eos_token_ids: tokens that end a text, in the order given; empty where the files name none.
        quantization: how its weights and caches are quantized; None where they are not.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        check_sizes(self)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TargetConfig:
        """Read `config.json` and, for the end tokens, `generation_config.json` where there is one.

        Raises:
            UserError: a file is missing or says something that is not supported.
        """
        directory = Path(directory)
        top = JsonObject.from_file(directory / CONFIG_FILE)
        config = cls.from_dict(dict(top.values), top.path)
        generation_path = directory / GENERATION_CONFIG_FILE
        if not is_file(generation_path):
            return config
        generation = JsonObject.from_file(generation_path)
        if "eos_token_id" not in generation:
            return config
        return replace(config, eos_token_ids=_eos_token_ids(generation, config.vocab_size))

    @classmethod
    def from_dict(cls, config: dict[str, Any], path: Path) -> TargetConfig:
        """Read a parsed `config.json` as transformers 4 or 5 writes it.

        These keys may be absent, with the meaning that the architecture's own definition gives that:
        `attention_bias`, `mlp_bias`, `use_sliding_window` and `tie_word_embeddings` are off, the rotary
        embedding is not scaled, `bos_token_id` and `eos_token_id` are none. For Llama, an absent
        `num_key_value_heads` is `num_attention_heads` and an absent `head_dim` is
        `hidden_size / num_attention_heads`. All other keys are required.

        Args:
            config: the parsed file.
            path: the file, for messages; `hf_quant_config.json` is looked for beside it.

        Raises:
            UserError: a key is missing or its value is not supported.
        """
        top = JsonObject(config, path)
        architecture = _architecture(top)
        vocab_size, hidden_size = top.size("vocab_size"), top.size("hidden_size")
        heads = top.size("num_attention_heads")
        kv_heads, head_dim = read_heads(top, derive=architecture == "LlamaForCausalLM")
        _refuse_unsupported(top, architecture)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=top.size("intermediate_size"),
            num_hidden_layers=top.size("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=top.positive("rms_norm_eps", largest=1),
            max_position_embeddings=top.size("max_position_embeddings"),
            rope=read_rope(config, head_dim, path),
            tie_word_embeddings=top.boolean("tie_word_embeddings", absent=False),
            attention_bias=top.boolean("attention_bias", absent=False),
            mlp_bias=top.boolean("mlp_bias", absent=False),
            bos_token_id=top.token_id("bos_token_id", vocab_size) if "bos_token_id" in top else None,
            eos_token_ids=_eos_token_ids(top, vocab_size),
            quantization=read_quantization(top),
        )

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` in transformers 5's spelling; `from_dict` reads it back unchanged."""
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope.to_dict(),
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
        }
        if self.architecture == "LlamaForCausalLM":
            config["mlp_bias"] = self.mlp_bias
        if self.quantization is not None:
            config[QUANTIZATION_KEY] = self.quantization.to_quantization_config()
        return config


def read_heads(top: JsonObject, derive: bool) -> tuple[int, int]:
    """`num_key_value_heads` and `head_dim`, checked against the number of heads.

    Args:
        top: the config.
        derive: both may be absent, and follow from `num_attention_heads` and `hidden_size`.
    """
    heads = top.size("num_attention_heads")
    derived = derive and "num_key_value_heads" not in top
    kv_heads = heads if derived else top.size("num_key_value_heads")
    if heads % kv_heads:
        raise top.error("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    if derive and "head_dim" not in top:
        hidden_size = top.size("hidden_size")
        if hidden_size % heads:
            raise top.error("hidden_size", f"must be a multiple of num_attention_heads, {heads}, or head_dim be given")
        head_dim = hidden_size // heads
    else:
        head_dim = top.size("head_dim")
    if head_dim % 2:
        raise top.error("head_dim", f"must be even for a rotary embedding, not {head_dim}")
    return kv_heads, head_dim


def _architecture(top: JsonObject) -> Architecture:
    architectures = top.texts("architectures")
    if len(architectures) != 1 or architectures[0] not in _MODEL_TYPES:
        raise top.error("architectures", f"not supported as a target; supported are {', '.join(_MODEL_TYPES)}")
    return architectures[0]


def _refuse_unsupported(top: JsonObject, architecture: Architecture) -> None:
    if top.text("hidden_act") != "silu":
        raise top.error("hidden_act", 'only "silu" is supported')
    if top.boolean("use_sliding_window", absent=False):
        raise top.error("use_sliding_window", "sliding-window targets are not supported")
    if "layer_types" in top and set(top.texts("layer_types")) != {"full_attention"}:
        raise top.error("layer_types", 'every layer of a target must be "full_attention"')
    if architecture == "Qwen3ForCausalLM" and top.boolean("mlp_bias", absent=False):
        raise top.error("mlp_bias", "Qwen3 has no MLP biases")


def _eos_token_ids(top: JsonObject, vocab_size: int) -> tuple[int, ...]:
    if "eos_token_id" not in top:
        return ()
    if not isinstance(top.values["eos_token_id"], list):
        return (top.token_id("eos_token_id", vocab_size),)
    ids = top.integers("eos_token_id")
    if max(ids, default=0) >= vocab_size:
        raise top.error("eos_token_id", f"must be below vocab_size, {vocab_size}")
    return ids
