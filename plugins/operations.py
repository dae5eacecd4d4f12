"""The operations of the plugin, as TensorRT is told of them."""

from __future__ import annotations

from typing import Any

import torch

from dflash_trt.plugins import verify
from dflash_trt.plugins.kernel import Kernel, cdiv
from dflash_trt.plugins.kv_write import kv_write_kernel
from dflash_trt.plugins.operation import Alias, Attributes, Operation, Output, Shapes, Types


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
    describe=lambda shapes, types, attributes: {"k_cache": Alias("k_cache_in"), "v_cache": Alias("v_cache_in")},
    configure=_kv_write_kernel,
    attributes={"eps": float, "has_norm": bool},
)

VERIFY_PARTIAL = Operation(
    name="verify_partial",
    inputs=("logits", "temperature", "seeds", "first", "valid", "offset"),
    outputs=("scores", "ids"),
    sizes=lambda shapes, types, attributes: {"batch": shapes["logits"][0], "rows": shapes["logits"][1]},
    describe=lambda shapes, types, attributes: {
        name: Output((*shapes["logits"][:2], cdiv(shapes["logits"][2], verify.CHUNK)), dtype)
        for name, dtype in {"scores": torch.float32, "ids": torch.int32}.items()
    },
    configure=lambda shapes, types, attributes: verify.partial(types["logits"], shapes["logits"][2]),
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
    configure=lambda shapes, types, attributes: verify.combine(),
)

OPERATIONS = (KV_WRITE, VERIFY_PARTIAL, VERIFY_COMBINE)
