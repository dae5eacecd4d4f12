"""The operations of the plugin, as TensorRT is told of them."""

from __future__ import annotations

from typing import Any

import torch

from dflash_trt.plugins.attention_combine import block_attention_combine_kernel
from dflash_trt.plugins.attention_partial import BlockAttention, block_attention_partial_kernel
from dflash_trt.plugins.attention_shares import Shares, filling_programs
from dflash_trt.plugins.gpus import MULTIPROCESSORS
from dflash_trt.plugins.kernel import Kernel, cdiv
from dflash_trt.plugins.kv_write_kernel import kv_write_kernel
from dflash_trt.plugins.operation import Attributes, Operation, Output, Shapes, Types
from dflash_trt.plugins.verify_kernels import CHUNK, verify_combine_kernel, verify_partial_kernel


def _kv_write_kernel(shapes: Shapes, types: Types, attributes: Attributes) -> Kernel:
    has_norm, eps = attributes["has_norm"], attributes["eps"]
    return kv_write_kernel(types["keys"], types["k_cache_in"], shapes["keys"][4], has_norm=has_norm, eps=eps)


def _kv_write_sizes(shapes: Shapes, types: Types, attributes: Attributes) -> dict[str, Any]:
    batch, rows, layers, kv_heads, _ = shapes["keys"]
    _, slots, _, positions, _ = shapes["k_cache_in"]
    sizes = {"batch": batch, "rows": rows, "layers": layers, "kv_heads": kv_heads}
    return {**sizes, "cache_slots": slots, "positions": positions}


KV_WRITE = Operation(
    name="kv_write",
    inputs=(
        *("keys", "values", "k_norm", "cos", "sin", "kv_len", "q_len", "slots"),
        *("k_scale", "v_scale", "k_cache_in", "v_cache_in"),
    ),
    outputs=("k_cache", "v_cache"),
    sizes=_kv_write_sizes,
    describe=lambda shapes, types, attributes: {
        name: Output(shapes[f"{name}_in"], types[f"{name}_in"]) for name in ("k_cache", "v_cache")
    },
    configure=_kv_write_kernel,
    attributes={"eps": float, "has_norm": bool},
)
"""The caches that it is given are not read: an output at the address of one keeps the rows that are not written."""


def _shares(attributes: Attributes) -> Shares:
    programs = filling_programs(MULTIPROCESSORS[attributes["compute_capability"]])
    ratio, most_rows = attributes["ratio"], attributes["most_rows"]
    return Shares(ratio=ratio, most_rows=most_rows, programs=programs, ahead_of_time=True)


def _attention(shapes: Shapes, types: Types, attributes: Attributes) -> BlockAttention:
    """Of the shapes only the head size matters, and that to the kernel alone: before it may be an expression."""
    return BlockAttention(
        dtype=types["q"],
        cache_dtype=types["k_cache"],
        head_dim=shapes["q"][3],
        programs=_shares(attributes).programs,
        ahead_of_time=True,
        **{name: attributes[name] for name in (*BLOCK_ATTENTION_PARTIAL.attributes, "compute_capability")},
    )


def _attention_kernel(shapes: Shapes, types: Types, attributes: Attributes) -> Kernel:
    heads, kv_heads = shapes["q"][2], shapes["k_cache"][-3]
    if heads != kv_heads * attributes["ratio"]:
        raise ValueError(f"{heads} query heads and {kv_heads} KV heads, not {attributes['ratio']} times as many")
    return block_attention_partial_kernel(_attention(shapes, types, attributes))


def _attention_sizes(shapes: Shapes, types: Types, attributes: Attributes) -> dict[str, Any]:
    batch, rows, _, _ = shapes["q"]
    cache_slots, kv_heads, positions, _ = shapes["k_cache"][-4:]
    splits = _shares(attributes).splits(batch, rows, kv_heads)
    sizes = {"batch": batch, "rows": rows, "kv_heads": kv_heads}
    return {**sizes, "cache_slots": cache_slots, "positions": positions, "splits": splits}


def _attention_outputs(shapes: Shapes, types: Types, attributes: Attributes) -> dict[str, Output]:
    batch, rows, _, head_dim = shapes["q"]
    shares = _shares(attributes)
    placed = shares.room(batch, rows, shapes["k_cache"][-3]), shares.block_m
    return {"partial": Output((*placed, head_dim), torch.float32), "lse": Output(placed, torch.float32)}


BLOCK_ATTENTION_PARTIAL = Operation(
    name="block_attention_partial",
    inputs=("q", "q_norm", "cos", "sin", "kv_len", "q_len", "slots", "k_scale", "v_scale", "k_cache", "v_cache"),
    outputs=("partial", "lse"),
    sizes=_attention_sizes,
    describe=_attention_outputs,
    configure=_attention_kernel,
    attributes={
        "eps": float,
        "has_norm": bool,
        "causal": bool,
        "window": int,
        "ratio": int,
        "most_rows": int,
    },
)
"""Caches are [slots, KV heads, positions, d], or that with one layer before. `ratio` is query heads a KV head; with
`most_rows` it says how rows are shared, which outputs' dimensions depend on, so that expressions cannot give it."""


def _combine_sizes(shapes: Shapes, types: Types, attributes: Attributes) -> dict[str, Any]:
    batch, rows, heads, _ = shapes["q"]
    shares, kv_heads = _shares(attributes), heads // attributes["ratio"]
    splits = shares.splits(batch, rows, kv_heads)
    sizes = {"batch": batch, "rows": rows, "heads": heads, "kv_heads": kv_heads}
    return {**sizes, "block_m": shares.block_m, "splits": splits}


BLOCK_ATTENTION_COMBINE = Operation(
    name="block_attention_combine",
    inputs=("partial", "lse", "sinks", "q"),
    outputs=("out",),
    sizes=_combine_sizes,
    describe=lambda shapes, types, attributes: {"out": Output(shapes["q"], types["q"])},
    configure=lambda shapes, types, attributes: block_attention_combine_kernel(
        types["q"], shapes["q"][3], has_sinks=attributes["has_sinks"]
    ),
    attributes={"has_sinks": bool, "ratio": int, "most_rows": int},
)

VERIFY_PARTIAL = Operation(
    name="verify_partial",
    inputs=("logits", "temperature", "seeds", "first", "valid", "offset"),
    outputs=("scores", "ids"),
    sizes=lambda shapes, types, attributes: {"batch": shapes["logits"][0], "rows": shapes["logits"][1]},
    describe=lambda shapes, types, attributes: {
        name: Output((*shapes["logits"][:2], cdiv(shapes["logits"][2], CHUNK)), dtype)
        for name, dtype in {"scores": torch.float32, "ids": torch.int32}.items()
    },
    configure=lambda shapes, types, attributes: verify_partial_kernel(types["logits"], shapes["logits"][2]),
)

VERIFY_COMBINE = Operation(
    name="verify_combine",
    inputs=("scores", "ids", "tokens", "draft_len"),
    outputs=("chosen", "accepted", "next"),
    sizes=lambda shapes, types, attributes: dict(zip(("batch", "rows", "chunks"), shapes["scores"], strict=True)),
    describe=lambda shapes, types, attributes: {
        "chosen": Output(shapes["tokens"], torch.int32),
        "accepted": Output(shapes["draft_len"], torch.int32),
        "next": Output(shapes["draft_len"], torch.int32),
    },
    configure=lambda shapes, types, attributes: verify_combine_kernel(),
)

OPERATIONS = (KV_WRITE, BLOCK_ATTENTION_PARTIAL, BLOCK_ATTENTION_COMBINE, VERIFY_PARTIAL, VERIFY_COMBINE)
