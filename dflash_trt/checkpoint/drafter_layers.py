"""What each layer of a drafter sees: its window, and whether its block is causal."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.json_object import JsonObject

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DraftLayer:
    """The attention mask of one layer. Query position q sees key position k where all that applies holds.

    Attributes:
        window: q - k < window, and k - q < window too where the layer is not causal; None for no limit.
        is_causal: k <= q. The context always comes before the block, so this only concerns the block.
    """

    window: int | None
    is_causal: bool


def read_layers(config: JsonObject, sliding_is_causal: bool) -> tuple[DraftLayer, ...]:
    """One `DraftLayer` per layer, by the rules of the authors' `Qwen3DFlashAttention` on a `Qwen3Config`.

    `layer_types` decides which layers slide; where it is absent, those from `max_window_layers` on do if
    there is a window. There is a window only where `use_sliding_window` is true. `is_causal`, where present,
    holds for every layer; else full layers are bidirectional in the block and sliding ones are as given.

    Args:
        config: the object with the Qwen3 keys.
        sliding_is_causal: what sliding layers are where `is_causal` is absent.

    Raises:
        UserError: a layer type that is not known, too many or few of them, or a window without a size.
    """
    count = config.size("num_hidden_layers")
    window = config.integer("sliding_window") if config.boolean("use_sliding_window", absent=False) else None
    if "layer_types" in config:
        types = config.texts("layer_types")
    elif window is None:
        types = (_FULL,) * count
    else:
        first = config.integer("max_window_layers", minimum=0)
        types = tuple(_SLIDING if index >= first else _FULL for index in range(count))
    if len(types) != count or not set(types) <= {_FULL, _SLIDING}:
        raise config.error("layer_types", f'must be {count} times "{_FULL}" or "{_SLIDING}"')

    causal_everywhere = config.boolean("is_causal", absent=False) if "is_causal" in config else None
    layers = []
    for layer_type in types:
        sliding = layer_type == _SLIDING
        is_causal = (sliding and sliding_is_causal) if causal_everywhere is None else causal_everywhere
        layers.append(DraftLayer(window if sliding else None, is_causal))
    return tuple(layers)
