"""The TensorRT backends' verifier and DFlash proposer, each over an engine of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dflash_trt.engine.bindings import EMBEDDING, Model, engine_bindings
from dflash_trt.engine.config import EngineConfig
from dflash_trt.ops.ranks import ALONE, Ranks
from dflash_trt.runtime.engine_io import CacheStorage, EngineIO, Sizes
from dflash_trt.runtime.executor import RankExecutor
from dflash_trt.runtime.kernel_choice import choose_by_kernels
from dflash_trt.runtime.ngram import NgramProposer
from dflash_trt.runtime.parallel_choice import choose_among_ranks, not_finite, verify_among_ranks
from dflash_trt.runtime.proposer import Proposal, ProposerName, Sequences
from dflash_trt.runtime.sampling import Sampling
from dflash_trt.runtime.verifier import Step, Verified


class EnginePass(Protocol):
    """Runs an engine of this rank."""

    def __call__(self, profile: str, tensors: Mapping[str, Tensor]) -> None:
        """A pass over every input and output by name, in the shapes that they have, under one of its profiles."""


def tensorrt_executor(
    config: EngineConfig,
    run_target: EnginePass,
    run_drafter: EnginePass,
    shared: Mapping[str, Tensor],
    *,
    ranks: Ranks = ALONE,
    proposer: ProposerName = "dflash",
) -> RankExecutor:
    """The engines of a rank, ready to run; caches and whatever else they are bound to is allocated once.

    What is not a cache is bound to the same memory in every pass, so that a pass can be captured once and replayed. The
    drafter's context is part of the target's engine, which writes it whoever proposes.

    Args:
        config: of the engine directory.
        run_target, run_drafter: the two engines; the drafter's is not called under another proposer.
        shared: the weights that both take as inputs, by name, on the device that they run on.
    """
    device, bindings = shared[EMBEDDING].device, engine_bindings(config)
    caches: dict[Model, CacheStorage] = {
        model: CacheStorage.allocate(model, config, device) for model in ("target", "drafter")
    }

    def engine(model: Model, run: EnginePass) -> _Engine:
        inputs = {binding.name for binding in bindings[model].inputs}
        held = {name: tensor for name, tensor in shared.items() if name in inputs}
        return _Engine(config, EngineIO(bindings[model], caches, held, device), run, ranks)

    verifier = TensorRTVerifier(config, engine("target", run_target), caches)
    if proposer == "ngram":
        return RankExecutor(verifier, NgramProposer(config.speculative_config.block_size - 1))
    return RankExecutor(verifier, TensorRTDFlash(config, engine("drafter", run_drafter), caches["drafter"]))


class TensorRTVerifier:
    """Runs the target's engine."""

    def __init__(self, config: EngineConfig, engine: _Engine, caches: Mapping[Model, CacheStorage]) -> None:
        build = config.build_config
        self.max_batch_size = build.max_batch_size
        self.max_seq_len = build.max_seq_len
        self.max_num_tokens = build.max_num_tokens
        self.caches = caches
        self._engine = engine
        self._vocab_size = config.pretrained_config.vocab_size

    @torch.inference_mode()
    def verify(self, step: Step) -> Verified:
        """See `Verifier.verify`."""
        engine, rows = self._engine, step.logit_rows
        values = {
            "tokens": step.tokens,
            "kv_len": step.kv_len,
            "q_len": step.q_len,
            "logit_rows": rows,
        }
        if engine.has_plugins:
            values |= {"slots": step.slots, "draft_len": step.draft_len, **_noise(step.sampling)}
        sizes: Sizes = {"batch": len(step.tokens), "rows": step.tokens.shape[1], "choices": rows.shape[1]}
        tensors = engine.run(sizes, step.slots, values)
        if step.sampling.needs_rows:
            # The engine's own logits stay as they are.
            verified = verify_among_ranks(engine.ranks, tensors["logits"].clone(), self._vocab_size, step)
        else:
            verified = self._verified(tensors, step)
        return verified.with_errors(not_finite(tensors["logits"].dtype))

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Verifier.move_slot`."""
        self.caches["target"].move_slot(source, destination, length)

    def _verified(self, tensors: Mapping[str, Tensor], step: Step) -> Verified:
        _, accepted, following = self._engine.chosen(
            ("chosen", "accepted", "next"),
            tensors,
            step.sampling,
            step.chosen_positions[:, 0],
            step.tokens.gather(1, step.logit_rows),
            step.draft_len,
        )
        return Verified(accepted, following)


class TensorRTDFlash:
    """DFlash's proposer: the drafter's engine over the context that the target's passes have written."""

    on_every_rank = True

    def __init__(self, config: EngineConfig, engine: _Engine, context: CacheStorage) -> None:
        self.max_draft_len = config.speculative_config.block_size - 1
        self._engine = engine
        self._context = context
        self._vocab_size = config.pretrained_config.vocab_size
        self._is_whole = config.speculative_config.has_reduced_vocabulary

    @torch.inference_mode()
    def propose(self, sequences: Sequences, count: int) -> Proposal:
        """See `Proposer.propose`."""
        engine, kv_len, sampling = self._engine, sequences.kv_len, sequences.sampling
        values = {"anchors": sequences.anchors, "kv_len": kv_len}
        if engine.has_plugins:
            values |= {"slots": sequences.slots, **_noise(sampling)}
        tensors = engine.run({"batch": len(kv_len)}, sequences.slots, values)
        if sampling.needs_rows:
            logits, positions = tensors["logits"][:, :count], kv_len[:, None] + torch.arange(1, 1 + count)
            ranks = ALONE if self._is_whole else engine.ranks
            tokens = choose_among_ranks(ranks, logits.clone(), self._vocab_size, positions, sampling, guesses=None)
        else:
            blank = torch.zeros(len(kv_len), self.max_draft_len, dtype=torch.int64)
            drafts, *_ = engine.chosen(
                ("drafts",), tensors, sampling, kv_len + 1, blank, blank[:, 0], whole=self._is_whole
            )
            # A drafter that overflows chooses no token; that must cost no more than a draft token.
            tokens = drafts[:, :count].clamp(min=0)
        return Proposal(tokens, torch.full_like(kv_len, count))

    def observe(self, step: Step, verified: Verified) -> None:
        """Nothing to learn: the target's pass has written the context."""

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """See `Proposer.move_slot`."""
        self._context.move_slot(source, destination, length)


class _Engine:
    """One engine of a rank over its bindings."""

    def __init__(self, config: EngineConfig, io: EngineIO, run: EnginePass, ranks: Ranks) -> None:
        self.ranks = ranks
        self.has_plugins = config.builder.uses_plugins
        self._vocab_size = config.pretrained_config.vocab_size
        self._io = io
        self._run = run

    def run(self, sizes: Sizes, slots: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A pass of these sizes over slots; its outputs that are no caches."""
        first = int(slots[0])
        # Row i of a native pass is slot `first` + i; the scheduler keeps active slots at the front.
        assert self.has_plugins or bool((slots == torch.arange(first, first + len(slots))).all())
        # The plugin's kernels mask what is padded; native layers would look up positions that rotary tables have not.
        padded = self._io.padded(sizes) if self.has_plugins else sizes
        tensors = self._io.bind(padded, first)
        self._io.fill(tensors, values)
        self._run(self._io.profile(sizes), tensors)
        return self._io.results(tensors, sizes)

    def chosen(
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
        if self.has_plugins:
            return [tensors[name].cpu().long() for name in names]
        ranks = ALONE if whole else self.ranks
        chosen = choose_by_kernels(ranks, tensors["logits"], self._vocab_size, sampling, first, tokens, draft_len)
        return [tensor.cpu().long() for tensor in chosen]


def _noise(sampling: Sampling) -> dict[str, Tensor]:
    return {"temperature": sampling.temperature, "seeds": sampling.seeds}
