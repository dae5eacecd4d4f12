"""How models ask for their weights, and how those are checked on the way in.

A model's `load` names every tensor it reads with the shape it must have. The same `load` run with a `Manifest` checks
and lists them from the files' headers, so what a build copies and what a model uses cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from dflash_trt.checkpoint.quantization_config import (
    QUANT_CONFIG_FILE,
    QUANTIZATION_KEY,
    QuantAlgo,
    QuantizationConfig,
)
from dflash_trt.checkpoint.weights import INDEX_DTYPES, Weights
from dflash_trt.errors import UserError
from dflash_trt.models.sharding import REPLICATED, Sharding, Split, local_shape, of_bias
from dflash_trt.ops.base import Linear, Tensor
from dflash_trt.quantization.fp8 import FP8Tensor
from dflash_trt.quantization.nvfp4 import NVFP4_BLOCK, NVFP4Tensor

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PACKED_DTYPES: dict[QuantAlgo, torch.dtype] = {
    "FP8": torch.float8_e4m3fn,
    "NVFP4": torch.uint8,
    "W4A16_NVFP4": torch.uint8,
}
"""Type of a weight in each format."""
_UNASKED = {
    ".input_scale": ", which quantizes no activations of this layer",
    ".k_scale": ", which has no kv_cache_quant_algo",
    ".v_scale": ", which has no kv_cache_quant_algo",
}
"""What to say of scales that the config does not speak of."""
_RECOMPUTED = ".rotary_emb.inv_freq"
"""Old Llama checkpoints store what their config says anyway."""


class WeightLoader(Protocol):
    """What a model's `load` is given.

    Shapes are those of the whole model, whose tensors ranks share as `sharding` says; what a loader gives, and checks,
    is one rank's part.
    """

    def tensor(self, name: str, shape: tuple[int, ...], sharding: Sharding = REPLICATED) -> Tensor:
        """The floating-point tensor `name`, which must have `shape`."""

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The integer tensor `name`, which must have `shape`."""

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
    ) -> Linear:
        """The layer of `name`.weight [out, in] in any format and, where `bias`, `name`.bias [out]."""

    def packed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding) -> Tensor:
        """The tensor `name` of a quantized weight, which must have `shape` and `dtype` and keeps both."""

    def scale(self, name: str) -> Tensor:
        """The float32 scalar `name`; a tensor of one element is one."""

    def ignore(self, name: str) -> None:
        """A tensor that a checkpoint may hold and this model has no use for."""


@dataclass(frozen=True)
class CheckpointLoader:
    """Reads from a checkpoint or an engine directory; `place` puts each tensor where it will be used.

    Whether a layer is quantized, and how, its tensors say: that they are what the config says is a `Manifest`'s to see.
    """

    weights: Weights
    place: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None
    """What unquantized tensors become; None for the type that they have."""
    ranks: int = 1
    """Of how many ranks `weights` are one's."""

    def tensor(self, name: str, shape: tuple[int, ...], sharding: Sharding = REPLICATED) -> torch.Tensor:
        """See `WeightLoader.tensor`."""
        _check(self.weights, name, local_shape(shape, sharding, self.ranks), _FLOATS)
        tensor = self.weights.read(name)
        return self.place(tensor if self.dtype is None else tensor.to(self.dtype))

    def integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See `WeightLoader.integers`."""
        _check(self.weights, name, shape, INDEX_DTYPES)
        return self.place(self.weights.read(name))

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
    ) -> Linear:
        """See `WeightLoader.linear`."""
        algo = _algo_in_file(self.weights, name)
        activations = algo is not None and f"{name}.input_scale" in self.weights
        return _load_linear(self, name, (out_features, in_features), sharding, bias, algo, activations)

    def packed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding) -> torch.Tensor:
        """See `WeightLoader.packed`."""
        _check(self.weights, name, local_shape(shape, sharding, self.ranks), (dtype,))
        return self.place(self.weights.read(name))

    def scale(self, name: str) -> torch.Tensor:
        """See `WeightLoader.scale`."""
        _check_scale(self.weights, name)
        return self.place(self.weights.read(name).reshape(()))

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""


@dataclass(frozen=True)
class Manifest:
    """Checks what a `load` asks of a checkpoint and lists it in its order; reads headers only.

    Each linear layer must have the format that the config gives it.
    """

    weights: Weights
    quantization: QuantizationConfig | None
    """What the config of this model, and of no other, says."""
    ranks: int = 1
    """Of how many ranks `weights` are one's: 1 of a checkpoint. Shapes are those of that rank's part."""
    linears: list[str] = field(default_factory=list)
    """Linear layers, in any format."""
    floats: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Unquantized tensors, which may be converted."""
    others: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Token ids."""
    quantized: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Packed weights and scales of blocks, which mean nothing in another type."""
    scales: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Float32 scalars."""
    ignored: set[str] = field(default_factory=set)
    shardings: dict[str, Sharding] = field(default_factory=dict)
    """How ranks share each of these; what is not among them is replicated."""

    def tensor(self, name: str, shape: tuple[int, ...], sharding: Sharding = REPLICATED) -> None:
        """See `WeightLoader.tensor`."""
        self.floats[name] = self._part(name, shape, _FLOATS, sharding)

    def integers(self, name: str, shape: tuple[int, ...]) -> None:
        """See `WeightLoader.integers`."""
        _check(self.weights, name, shape, INDEX_DTYPES)
        self.others[name] = shape

    def linear(
        self, name: str, out_features: int, in_features: int, *, bias: bool = False, sharding: Sharding = REPLICATED
    ) -> Linear:
        """See `WeightLoader.linear`."""
        self.linears.append(name)
        algo, activations = None, False
        if self.quantization is not None:
            algo = self.quantization.algo_of(name)
            activations = algo is not None and self.quantization.quantizes_activations
        self._check_format(name, algo, in_features)
        return _load_linear(self, name, (out_features, in_features), sharding, bias, algo, activations)

    def packed(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sharding: Sharding) -> None:
        """See `WeightLoader.packed`."""
        self.quantized[name] = self._part(name, shape, (dtype,), sharding)

    def scale(self, name: str) -> None:
        """See `WeightLoader.scale`."""
        _check_scale(self.weights, name)
        self.scales[name] = self.weights.shape(name)

    def ignore(self, name: str) -> None:
        """See `WeightLoader.ignore`."""
        self.ignored.add(name)

    def refuse_unread(self) -> None:
        """Refuse a checkpoint with tensors that the model has no place for: it is not what its config describes.

        Raises:
            UserError: naming the first such tensor and its file.
        """
        known = self.floats.keys() | self.others.keys() | self.quantized.keys() | self.scales.keys() | self.ignored
        unread = sorted(n for n in self.weights.names() if n not in known and not n.endswith(_RECOMPUTED))
        if unread:
            count = f", the first of {len(unread)} such" if len(unread) > 1 else ""
            why = next((why for ending, why in _UNASKED.items() if unread[0].endswith(ending)), "")
            raise UserError(
                f"{self.weights.file_of(unread[0])}: tensor {unread[0]} has no place in the model that the config "
                f"describes{why}{count}"
            )

    def _part(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], sharding: Sharding
    ) -> tuple[int, ...]:
        self.shardings[name] = sharding
        shape = local_shape(shape, sharding, self.ranks)
        _check(self.weights, name, shape, dtypes)
        return shape

    def _check_format(self, name: str, algo: QuantAlgo | None, in_features: int) -> None:
        weight = f"{name}.weight"
        if weight not in self.weights:
            return  # which is refused with the shape that it must have
        dtype = self.weights.dtype(weight)
        where = f"{self.weights.file_of(weight)}: tensor {weight} has type {_name(dtype)}"
        if algo is None:
            if dtype not in PACKED_DTYPES.values():
                return
            if self.quantization is None:
                raise UserError(
                    f"{where}, a quantized weight's, and the checkpoint does not say how it is quantized; it lacks "
                    f"{QUANT_CONFIG_FILE}, or a {QUANTIZATION_KEY} in its config.json"
                )
            raise UserError(f"{where}, a quantized weight's; the config leaves {name} unquantized")
        if dtype != PACKED_DTYPES[algo]:
            raise UserError(f"{where}; the config says that {name} is {algo}, which is {_name(PACKED_DTYPES[algo])}")
        if algo != "FP8" and in_features % NVFP4_BLOCK:
            raise UserError(
                f"{where} and {in_features} inputs, no multiple of the {NVFP4_BLOCK} that share a scale in {algo}; "
                f"the config must exclude {name}"
            )


def _load_linear(
    loader: WeightLoader,
    name: str,
    shape: tuple[int, int],
    sharding: Sharding,
    bias: bool,
    algo: QuantAlgo | None,
    activations: bool,
) -> Linear:
    """A layer [out, in] by the names and shapes that ModelOpt's unified checkpoints give each format."""
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    rows, columns = shape
    held: Tensor | FP8Tensor | NVFP4Tensor
    if algo is None:
        held = loader.tensor(weight, shape, sharding)
    elif algo == "FP8":
        held = FP8Tensor(loader.packed(weight, shape, PACKED_DTYPES[algo], sharding), loader.scale(scale))
    else:
        of_scales = replace(sharding, filling=1.0) if isinstance(sharding, Split) else sharding
        held = NVFP4Tensor(
            loader.packed(weight, (rows, columns // 2), PACKED_DTYPES[algo], sharding),
            loader.packed(scale, (rows, columns // NVFP4_BLOCK), torch.float8_e4m3fn, of_scales),
            loader.scale(f"{name}.weight_scale_2"),
        )
    return Linear(
        held,
        loader.tensor(f"{name}.bias", (rows,), of_bias(sharding)) if bias else None,
        loader.scale(f"{name}.input_scale") if activations else None,
    )


def _algo_in_file(weights: Weights, name: str) -> QuantAlgo | None:
    """The format of a layer's weight, told by its type."""
    weight = f"{name}.weight"
    dtype = weights.dtype(weight) if weight in weights else None
    return next((algo for algo, packed in PACKED_DTYPES.items() if packed == dtype), None)


def _check_scale(weights: Weights, name: str) -> None:
    if name not in weights:
        why = ", a scalar that the config's quantization needs"
        if name.endswith(".input_scale"):
            why += ": a linear that no calibration token reached has none; calibrate with more text"
        raise UserError(f"{weights.path}: lacks the tensor {name}{why}")
    # Some exporters write a scalar as [1].
    _check(weights, name, (1,) if weights.shape(name) == (1,) else (), (torch.float32,))


def _check(weights: Weights, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if name not in weights:
        raise UserError(f"{weights.path}: lacks the tensor {name}, of shape {list(shape)}")
    where = f"{weights.file_of(name)}: tensor {name}"
    if weights.shape(name) != shape:
        raise UserError(f"{where} has shape {list(weights.shape(name))}; the config makes it {list(shape)}")
    if weights.dtype(name) not in dtypes:
        allowed = " or ".join(filter(None, (", ".join(map(_name, dtypes[:-1])), _name(dtypes[-1]))))
        raise UserError(f"{where} has type {_name(weights.dtype(name))}; it must be {allowed}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
