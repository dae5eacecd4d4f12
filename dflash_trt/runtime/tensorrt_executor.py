"""The executor of the TensorRT backends: the torch executor's twin over two engines a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dflash_trt.engine.bindings import EMBEDDING, Bindings, Model, engine_bindings
from dflash_trt.engine.config import EngineConfig
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO, Sizes
from dflash_trt.runtime.kernel_choice import choose_by_kernels
from dflash_trt.runtime.parallel_choice import choose_among_ranks, not_finite, verify_among_ranks
from dflash_trt.runtime.sampling import Sampling
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
    """

    def __init__(
        self,
        config: EngineConfig,
        run_target: EnginePass,
        run_drafter: EnginePass,
        shared: Mapping[str, Tensor],
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        build = config.build_config
        self.max_batch_size = build.max_batch_size
        self.max_seq_len = build.max_seq_len
        self.max_num_tokens = build.max_num_tokens
        self.block_size = config.speculative_config.block_size
        self._vocab_size = config.pretrained_config.vocab_size
        self._drafter_is_whole = config.speculative_config.has_reduced_vocabulary
        self._plugins = config.builder.uses_plugins
        self._ranks = ranks
        device = shared[EMBEDDING].device
        self._caches: dict[Model, CacheStorage] = {
            model: CacheStorage.allocate(model, config, device) for model in ("target", "drafter")
        }

        def io(bindings: Bindings) -> EngineIO:
            inputs = {binding.name for binding in bindings.inputs}
            held = {name: tensor for name, tensor in shared.items() if name in inputs}
            return EngineIO(bindings, self._caches, held, device)

        bindings = engine_bindings(config)
        self._target, self._run_target = io(bindings["target"]), run_target
        self._drafter, self._run_drafter = io(bindings["drafter"]), run_drafter

    @torch.inference_mode()
    def verify(self, step: Step) -> Verified:
        """See `Executor.verify`."""
        rows = step.logit_rows
        values = {
            "tokens": step.tokens,
            "kv_len": step.kv_len,
            "q_len": step.q_len,
            "logit_rows": rows,
        }
        if self._plugins:
            values |= {"slots": step.slots, "draft_len": step.draft_len, **_noise(step.sampling)}
        sizes: Sizes = {"batch": len(step.tokens), "rows": step.tokens.shape[1], "choices": rows.shape[1]}
        tensors = self._run(self._target, self._run_target, sizes, step.slots, values)
        if step.sampling.needs_rows:
            # The engine's own logits stay as they are.
            verified = verify_among_ranks(self._ranks, tensors["logits"].clone(), self._vocab_size, step)
        else:
            verified = self._verified(tensors, step)
        return verified.with_errors(not_finite(tensors["logits"].dtype))

    def _verified(self, tensors: Mapping[str, Tensor], step: Step) -> Verified:
        _, accepted, following = self._chosen(
            ("chosen", "accepted", "next"),
            tensors,
            step.sampling,
            step.chosen_positions[:, 0],
            step.tokens.gather(1, step.logit_rows),
            step.draft_len,
        )
        return Verified(accepted, following)

    @torch.inference_mode()
    def draft(self, anchors: Tensor, kv_len: Tensor, slots: Tensor, sampling: Sampling, count: int) -> Tensor:
        """See `Executor.draft`."""
        values = {"anchors": anchors, "kv_len": kv_len}
        if self._plugins:
            values |= {"slots": slots, **_noise(sampling)}
        tensors = self._run(self._drafter, self._run_drafter, {"batch": len(anchors)}, slots, values)
        if sampling.needs_rows:
            logits, positions = tensors["logits"][:, :count], kv_len[:, None] + torch.arange(1, 1 + count)
            ranks = ALONE if self._drafter_is_whole else self._ranks
            return choose_among_ranks(ranks, logits.clone(), self._vocab_size, positions, sampling, guesses=None)
        blank = torch.zeros(len(anchors), self.block_size - 1, dtype=torch.int64)
        drafts, *_ = self._chosen(
            ("drafts",), tensors, sampling, kv_len + 1, blank, blank[:, 0], whole=self._drafter_is_whole
        )
        # A drafter that overflows chooses no token; that must cost no more than a guess.
        return drafts[:, :count].clamp(min=0)

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
        # The plugin's kernels mask what is padded; native layers would look up positions that rotary tables have not.
        padded = io.padded(sizes) if self._plugins else sizes
        tensors = io.bind(padded, first)
        io.fill(tensors, values)
        run(io.profile(sizes), tensors)
        return io.results(tensors, sizes)

    def _chosen(
        self,
        names: Sequence[str],
        tensors: Mapping[str, Tensor],
        sampling: Sampling,
        first: Tensor,
        tokens: Tensor,
        draft_len: Tensor,
        *,
        whole: bool = False,
    ) -> list[Tensor]:
        """What an engine with the plugin gives under `names`, or the same kernels after one without; on the CPU."""
        if self._plugins:
            return [tensors[name].cpu().long() for name in names]
        ranks = ALONE if whole else self._ranks
        chosen = choose_by_kernels(ranks, tensors["logits"], self._vocab_size, sampling, first, tokens, draft_len)
        return [tensor.cpu().long() for tensor in chosen]


def _noise(sampling: Sampling) -> dict[str, Tensor]:
    return {"temperature": sampling.temperature, "seeds": sampling.seeds}
