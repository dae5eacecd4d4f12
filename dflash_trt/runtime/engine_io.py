"""Where the inputs and outputs of a rank's engines lie, for passes of any size.

Nothing here needs a GPU: a pass of an engine is tensors by binding name, views of what was allocated once, which an
executor hands over as addresses and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dflash_trt.engine.bindings import Binding, Bindings, Model, Profile, Size, whole_cache
from dflash_trt.engine.config import EngineConfig
from dflash_trt.errors import UserError
from dflash_trt.ops.tensorrt_ops import UPDATED

Sizes = Mapping[Size, int]


@dataclass(frozen=True)
class CacheStorage:
    """One model's caches, all layers together: each [layers, slots, KV heads, positions, d]."""

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(cls, model: Model, config: EngineConfig, device: torch.device) -> CacheStorage:
        """Zeros: what a cache holds before it is written must be finite."""
        cache = whole_cache(model, config)
        keys, values = (torch.zeros(cache.shape, dtype=cache.dtype, device=device) for _ in range(2))
        return cls(keys, values)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of a slot, in every layer."""
        for cache in (self.keys, self.values):
            cache[:, destination, :, :length] = cache[:, source, :, :length]


class EngineIO:
    """The bindings of one engine over allocated memory.

    Args:
        bindings: its table.
        caches: by the model whose they are.
        shared: the weights that the engine takes as inputs, by name.
    """

    def __init__(
        self,
        bindings: Bindings,
        caches: Mapping[Model, CacheStorage],
        shared: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self._bindings = bindings
        self._caches = caches
        self._shared = shared
        self._buffers = {
            binding.name: torch.zeros(bindings.most_elements(binding), dtype=binding.dtype, device=device)
            for binding in (*bindings.inputs, *bindings.outputs)
            if binding.name not in shared and _cache_of(binding.name, caches) is None
        }

    def profile(self, sizes: Sizes) -> str:
        """The name of the first profile that holds such a pass.

        Raises:
            UserError: none does.
        """
        for name, profile in self._bindings.profiles.items():
            if all(profile[size].least <= value <= profile[size].most for size, value in sizes.items()):
                return name
        raise UserError(
            f"a pass of {_said(sizes)} fits no profile of the engine: "
            + "; ".join(f"{name}: {_ranges(profile)}" for name, profile in self._bindings.profiles.items())
        )

    def padded(self, sizes: Sizes) -> dict[Size, int]:
        """The next powers of two that a profile holds, so that an engine meets few shapes however many passes have.

        Plugins compiled ahead of time take up memory with every change of shape (TensorRT issue 4849).
        """
        profile = self._bindings.profiles[self.profile(sizes)]
        return {size: min(1 << (value - 1).bit_length(), profile[size].most) for size, value in sizes.items()}

    def bind(self, sizes: Sizes, first_slot: int = 0) -> dict[str, Tensor]:
        """Every input and output of a pass of these sizes, row i of which is slot `first_slot` + i.

        The same memory every time; what is not a cache starts where it always does.
        """
        tables = (*self._bindings.inputs, *self._bindings.outputs)
        return {binding.name: self._bound(binding, sizes, first_slot) for binding in tables}

    def fill(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copy what a pass is given, no more and no less, to where it is bound: what is missing would be stale.

        A value may be smaller than what it is bound to, which then holds the binding's padding beyond it.
        """
        taken = {each.name: each for each in self._bindings.inputs if each.name in self._buffers}
        if values.keys() != taken.keys():
            raise ValueError(f"a pass was given {sorted(values)}, it takes {sorted(taken)}")
        for name, value in values.items():
            if value.shape != tensors[name].shape:
                tensors[name].fill_(taken[name].padding)
            tensors[name][tuple(map(slice, value.shape))].copy_(value)

    def results(self, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """The outputs that are no caches, as far as a pass of these sizes has them."""
        outputs = [binding for binding in self._bindings.outputs if binding.name in self._buffers]
        return {each.name: tensors[each.name][tuple(map(slice, _shape(each, sizes)))] for each in outputs}

    def _bound(self, binding: Binding, sizes: Sizes, first_slot: int) -> Tensor:
        shape = _shape(binding, sizes)
        cache = _cache_of(binding.name, self._caches)
        if cache is not None:
            return _rows_of(cache, binding, shape[0], first_slot)
        if binding.name in self._shared:
            return self._shared[binding.name]
        return self._buffers[binding.name][: _numel(binding, sizes)].view(shape)


def _cache_of(name: str, caches: Mapping[Model, CacheStorage]) -> tuple[Tensor, int | None] | None:
    """The storage behind a binding, and the layer of it where it is of one: MODEL.keys or MODEL.LAYER.keys."""
    model, *layer_and_kind = name.removesuffix(UPDATED).split(".")
    if not layer_and_kind:
        return None
    storage = getattr(caches[cast(Model, model)], layer_and_kind[-1])
    return storage, int(layer_and_kind[0]) if len(layer_and_kind) == 2 else None


def _rows_of(cache: tuple[Tensor, int | None], binding: Binding, rows: int, first_slot: int) -> Tensor:
    storage, layer = cache
    if layer is None:
        return storage
    if binding.shape[0] == "batch":
        return storage[layer, first_slot : first_slot + rows]
    return storage[layer : layer + 1]


def _shape(binding: Binding, sizes: Sizes) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else sizes[size] for size in binding.shape)


def _numel(binding: Binding, sizes: Sizes) -> int:
    return torch.Size(_shape(binding, sizes)).numel()


def _said(sizes: Sizes) -> str:
    return ", ".join(f"{size} {value}" for size, value in sizes.items())


def _ranges(profile: Profile) -> str:
    return ", ".join(f"{size} {values.least} to {values.most}" for size, values in profile.items())
