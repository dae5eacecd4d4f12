"""What a pair's drafts are worth: tokens that a verification emits, counted while really decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.open_checkpoint import DrafterCheckpoint, TargetCheckpoint
from dflash_trt.models.pair import load_pair
from dflash_trt.runtime.detokenizer import Detokenizer
from dflash_trt.runtime.request import Request, Statistics
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.torch_executor import torch_executor
from dflash_trt.runtime.window import FixedWindow

_BATCH_SIZE = 8
_PROMPT_ROWS = 512


@dataclass(frozen=True)
class PairAcceptance:
    """What one pair decoded.

    Attributes:
        acceptance_length: tokens that a verification emitted on average; None where every output was one token.
        decoded_tokens, verifications: what it is the ratio of.
    """

    acceptance_length: float | None
    decoded_tokens: int
    verifications: int


@dataclass(frozen=True)
class Acceptance:
    """Both pairs on the same prompts, the first half of every sample, decoded greedily with whole blocks.

    Attributes:
        prompts: how many.
        max_tokens: output tokens of each at most.
        original, converted: drafter and target both.
    """

    prompts: int
    max_tokens: int
    original: PairAcceptance
    converted: PairAcceptance


def measure_acceptance(
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    prompts: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerFast,
    max_tokens: int,
    dtype: torch.dtype,
    advance: Callable[[int], None],
) -> PairAcceptance:
    """Decode prompts greedily with whole blocks, and count over all of them.

    Args:
        target, drafter: seen to belong together.
        prompts: token ids of the target's vocabulary, at least one each.
        tokenizer: the target's.
        max_tokens: output tokens of a prompt at most; the target's end token ends it before.
        dtype: to compute in; packed weights and FP8 caches stay what they are.
        advance: told of prompts, with how many, when their outputs end.

    Raises:
        UserError: a checkpoint is damaged, or the target's logits are not finite.
    """
    max_seq_len = max(map(len, prompts)) + max_tokens
    positions = max_seq_len + drafter.config.block_size
    pair = load_pair(target, drafter, positions=positions, dtype=dtype, device=torch.device("cpu"))
    executor = torch_executor(
        pair,
        max_batch_size=min(_BATCH_SIZE, len(prompts)),
        max_seq_len=max_seq_len,
        max_num_tokens=_PROMPT_ROWS,
    )
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    requests = [
        Request(
            prompt,
            params,
            limit=max_seq_len,
            stop_token_ids=target.config.eos_token_ids,
            detokenizer=Detokenizer(tokenizer, ()),
            vocab_size=target.config.vocab_size,
        )
        for prompt in prompts
    ]
    scheduler = Scheduler(executor, FixedWindow(executor.max_window))
    scheduler.add(requests)
    ended = 0
    while not scheduler.idle:
        scheduler.step()
        before, ended = ended, sum(request.finish_reason is not None for request in requests)
        advance(ended - before)
    total = Statistics()
    for request in requests:
        total.add(request.statistics)
    return PairAcceptance(total.acceptance_length, total.decoded_tokens, total.verifications)
