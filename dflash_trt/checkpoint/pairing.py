"""Does this drafter belong to this target?"""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.drafter import DrafterConfig
from dflash_trt.checkpoint.target import CONFIG_FILE, TargetConfig
from dflash_trt.errors import UserError


def check_pairing(target: TargetConfig, target_path: Path, drafter: DrafterConfig, drafter_path: Path) -> None:
    """Refuse a drafter that was made for another target.

    The drafter reads the target's embedding and K tapped states of `hidden_size` each, so both widths are
    one; its taps are layers that the target has; its tokens are the target's.

    Args:
        target, target_path: the target, and the directory or GGUF file it was read from.
        drafter, drafter_path: the drafter, and the directory it was read from.

    Raises:
        UserError: with both files, the key and both values.
    """
    here, there = _config_file(drafter_path), _config_file(target_path)
    speculators = drafter.format == "speculators"
    body = "transformer_layer_config." if speculators else ""

    def refuse(key: str, value: object, target_key: str, target_value: int, rule: str) -> UserError:
        return UserError(f"{here}: {key} is {value}, {target_key} of {there} is {target_value}: {rule}")

    if drafter.hidden_size != target.hidden_size:
        raise refuse(
            f"{body}hidden_size",
            drafter.hidden_size,
            "hidden_size",
            target.hidden_size,
            "a drafter is as wide as its target",
        )
    if drafter.vocab_size != target.vocab_size:
        raise refuse(
            f"{body}vocab_size",
            drafter.vocab_size,
            "vocab_size",
            target.vocab_size,
            "a drafter has the vocabulary of its target",
        )
    if drafter.num_target_layers not in (None, target.num_hidden_layers):
        raise refuse(
            "num_target_layers",
            drafter.num_target_layers,
            "num_hidden_layers",
            target.num_hidden_layers,
            "the drafter was trained for another target",
        )
    deepest = max(drafter.target_layer_ids)
    if deepest >= target.num_hidden_layers:
        stored = deepest + 1 if speculators else deepest
        last = target.num_hidden_layers if speculators else target.num_hidden_layers - 1
        raise refuse(
            "aux_hidden_state_layer_ids" if speculators else "target_layer_ids",
            f"up to {stored}",
            "num_hidden_layers",
            target.num_hidden_layers,
            f"the last layer to tap is {last}",
        )
    if drafter.mask_token_id >= target.vocab_size:
        raise refuse(
            "mask_token_id",
            drafter.mask_token_id,
            "vocab_size",
            target.vocab_size,
            "the mask needs a row of the embedding",
        )


def _config_file(path: Path) -> Path:
    return path / CONFIG_FILE if path.is_dir() else path
