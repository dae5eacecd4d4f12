"""The executor of the TensorRT backends: the torch executor's twin over two engines a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_trt.engine.bindings import EMBEDDING, Bindings, Model, drafter_bindings, target_bindings
from dflash_trt.engine.config import EngineConfig
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO, Sizes
from dflash_trt.runtime.parallel_choice import choose_among_ranks, refuse_overflow
from dflash_trt.runtime.sampling import Sampling, choose
from dflash_trt.runtime.step import Step, Verified


class EnginePass(Protocol):
    """Runs an engine of this rank."""

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        """A pass over every input and output by name, in the shapes that they have, under one of its profiles."""


class TensorRTExecutor:
    """Runs the engines of a rank; caches and whatever else they are bound to is allocated once.

    Of several ranks, as `TorchExecutor`. What is not a cache is bound to the same memory in every pass, so that a pass
    can be captured once and replayed.

    Args:
        config: of the engine directory.
        run_target, run_drafter: the two engines.
        shared: the weights that both take as inputs, by name, on the device that they run on.
        plugins: the engines hold our plugin, and choose tokens themselves.
    """

    def __init__(
        self,
        config: EngineConfig,
        run_target: EnginePass,
        run_drafter: EnginePass,
        shared: Mapping[str, Tensor],
        *,
        plugins: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        build = config.build_config
        self.max_batch_size = build.max_batch_size
        self.max_seq_len = build.max_seq_len
        self.max_num_tokens = build.max_num_tokens
        self.block_size = config.speculative_config.block_size
        self._config = config
        self._plugins = plugins
        self._ranks = ranks
        device = shared[EMBEDDING].device
        self._caches: dict[Model, CacheStorage] = {
            model: CacheStorage.allocate(model, config, device) for model in ("target", "drafter")
        }

        def io(bindings: Bindings) -> EngineIO:
            inputs = {binding.name for binding in bindings.inputs}
            held = {name: tensor for name, tensor in shared.items() if name in inputs}
            return EngineIO(bindings, self._caches, held, device)

        self._target, self._run_target = io(target_bindings(config, plugins=plugins)), run_target
        self._drafter, self._run_drafter = io(drafter_bindings(config, plugins=plugins)), run_drafter

    @torch.inference_mode()
    def verify(self, step: Step) -> Verified:
        """See `Executor.verify`.

        Raises:
            UserError: the target's logits are not finite.
        """
        rows = step.logit_rows
        values = {
            "tokens": step.tokens,
            "kv_len": step.kv_len,
            "q_len": step.q_len,
            "logit_rows": rows,
            "draft_len": step.draft_len,
            "slots": step.slots,
            **_noise(step.sampling),
        }
        sizes: Sizes = {"batch": len(step.tokens), "rows": step.tokens.shape[1], "choices": rows.shape[1]}
        tensors = self._run(self._target, self._run_target, sizes, step.slots, values)
        refuse_overflow(tensors["logits"], self._ranks)
        if self._plugins and not step.sampling.needs_rows:
            return Verified(tensors["accepted"].cpu().long(), tensors["next"].cpu().long())
        return step.verified(self._choose(tensors["logits"], step.chosen_positions, step.sampling, step.guesses))

    @torch.inference_mode()
    def draft(self, anchors: Tensor, kv_len: Tensor, slots: Tensor, sampling: Sampling, count: int) -> Tensor:
        """See `Executor.draft`."""
        values = {"anchors": anchors, "kv_len": kv_len, "slots": slots, **_noise(sampling)}
        tensors = self._run(self._drafter, self._run_drafter, {"batch": len(anchors)}, slots, values)
        if self._plugins and not sampling.needs_rows:
            return tensors["drafts"][:, :count].cpu().long()
        logits, positions = tensors["logits"][:, :count], kv_len[:, None] + torch.arange(1, 1 + count)
        no_guesses = anchors[:, None][:, :0]
        if self._config.speculative_config.has_reduced_vocabulary:  # whose head every rank has whole
            return choose(logits, positions, sampling, no_guesses)
        return self._choose(logits, positions, sampling, no_guesses)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Executor.move_slot`."""
        for caches in self._caches.values():
            caches.move_slot(source, destination, length)

    def _run(
        self, io: EngineIO, run: EnginePass, sizes: Sizes, slots: Tensor, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        first = int(slots[0])
        # Row i of a native pass is slot `first` + i; the scheduler keeps active slots at the front.
        assert self._plugins or bool((slots == torch.arange(first, first + len(slots))).all())
        profile = io.profile(sizes)
        tensors = io.bind(sizes, first)
        for name, value in values.items():
            if name in tensors:
                tensors[name].copy_(value)
        run(profile, tensors)
        return tensors

    def _choose(self, logits: Tensor, positions: Tensor, sampling: Sampling, guesses: Tensor) -> Tensor:
        vocab_size = self._config.pretrained_config.vocab_size
        return choose_among_ranks(self._ranks, logits.clone(), vocab_size, positions, sampling, guesses)


def _noise(sampling: Sampling) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "seeds": sampling.seeds}
